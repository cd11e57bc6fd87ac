"""A ledger of an older schema, brought to this one. A copy of how it was is kept.

Everything happens in one transaction under the write lock: whoever dies in the middle leaves the ledger as it was, and
perhaps a copy. From schema 0001 the events of before stay as they are; the new log begins with an event that names
their last hash, and tells every row as it is at this moment. Later schemas keep their log, which goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import ConflictError, DeadlineError
from posttrain.domain.principals import DRIVER
from posttrain.store import postgres
from posttrain.store.audit import verify_rows
from posttrain.store.backing import copy_ledger
from posttrain.store.before import verify_rows_before
from posttrain.store.chain import seal_before, verify_before
from posttrain.store.database import Database, hold_off_others, migrate, schema_version
from posttrain.store.edges import fill_edges
from posttrain.store.journal import UPGRADED, Author, Journal, new_request, tell_rows
from posttrain.store.ledger import Ledger
from posttrain.store.schema import SCHEMA_VERSION, events, payloads, principals, runs, unsealed, work
from posttrain.store.sealer import seal, verify_chain

_FIRST = "0001"
_TELLS = frozenset(table.name for table in (events, payloads, principals, unsealed, work))
_TRY_SECONDS = 0.5  # that others are kept waiting by one try to be alone: PostgreSQL looks for deadlocks after a second
_PATIENCE_SECONDS = 300.0  # of all tries


@dataclass(frozen=True, slots=True)
class Upgraded:
    """What an upgrade did."""

    came_from: str  # schema; the same as `schema`: there was nothing to do
    schema: str
    copy: str  # where the ledger of before is; empty: nothing was done
    runs: int
    events: int  # of before, which still hold by their own rule


def upgrade_ledger(
    location: str | Path, alive: Callable[[str], bool], say: Callable[[str], None] = lambda line: None
) -> Upgraded:
    """Bring a ledger to the present schema and prove that what it told before holds.

    Args:
        alive: whether a holder of a lease (`host:pid:start`) may still live.
        say: told what it waits for.

    Raises:
        ConflictError: a driver is at work whose version cannot use the new schema.
        IntegrityError: the log of before does not hold, or rows are not what it told; nothing is changed.
        DeadlineError: somebody else is at work in it without an end.
        WorkspaceError: no ledger, a newer one, or no room for the copy.
    """
    database = Database(location, create=False, older=True)
    try:
        ledger = Ledger(database)
        _verify_newer(ledger)
        with database.write(across="a ledger is upgraded") as connection:
            _come_alone(connection, say)
            came_from, kept = schema_version(connection) or SCHEMA_VERSION, ""
            if came_from < SCHEMA_VERSION:
                if came_from == _FIRST:
                    _refuse_driven(connection, database.clock.now(), alive)
                    kept = _begin_log(connection, database)
                else:
                    kept = _go_on(connection, ledger, came_from)
                crashpoint("upgrade.before_commit")
        seal(ledger)
        report = verify_chain(ledger)
        verify_rows(ledger)
        with database.read(across="a ledger is upgraded") as connection:
            count = connection.execute(select(func.count()).select_from(runs)).scalar_one()
    finally:
        database.close()
    return Upgraded(came_from, max(came_from, SCHEMA_VERSION), kept, count, report.before)


def _come_alone(connection: Connection, say: Callable[[str], None]) -> None:
    """Whoever upgrades the ledger at this moment comes first, then who is at work; then all wait until this is over.

    Raises:
        DeadlineError: somebody is at work without an end.
    """
    if connection.dialect.name != "postgresql":
        return  # which has one writer anyway
    if not hold_off_others(connection, wait=False):
        say("another process makes or upgrades this ledger; waiting until it is done")
        hold_off_others(connection)
    quoted = connection.dialect.identifier_preparer.quote
    tables = ", ".join(quoted(name) for name in sorted(inspect(connection).get_table_names(), key=_turn))
    if not tables:
        return
    # autovacuum makes room for who waits for a second, and may not come back; nobody else minds this lock
    connection.exec_driver_sql(f"LOCK TABLE {tables} IN SHARE UPDATE EXCLUSIVE MODE")
    until, told = time.monotonic() + _PATIENCE_SECONDS, False
    while not _take(connection, tables):
        if time.monotonic() >= until:
            raise DeadlineError(
                "the ledger must be left alone for a moment, and somebody was always at work in it for "
                f"{_PATIENCE_SECONDS:g} s; end what takes so long (pg_stat_activity names it) and run `posttrain "
                "upgrade` again; nothing was changed"
            )
        if not told:
            say("somebody is at work in this ledger at this moment; waiting for the end of that transaction")
        told = True
        time.sleep(_TRY_SECONDS)  # who waited for us goes on


def _turn(table: str) -> tuple[bool, bool, str]:
    """When a table's turn is: most transactions begin with `runs`, and end with what tells of them."""
    return table != runs.name, table in _TELLS, table


def _take(connection: Connection, tables: str) -> bool:
    """Take all tables or none. False: somebody was at work all the time.

    Whoever writes changes rows first and tells them in `events` last; a revision changes any table. If this held one
    table while it waits for another, those who have that one and need the first would wait for it: a deadlock, of which
    PostgreSQL ends one or the other. So it lets go of all before anybody has waited long enough to look for one.
    """
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {int(1000 * _TRY_SECONDS)}")
            connection.exec_driver_sql(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")
            connection.exec_driver_sql("SET LOCAL statement_timeout TO DEFAULT")
    except OperationalError as error:
        if not postgres.in_the_way(error.orig):
            raise
        return False
    return True


def _verify_newer(ledger: Ledger) -> None:
    """A log that goes on must hold. Before the transaction, in which a server would not let us be silent so long."""
    with ledger.database.read(across="a ledger is upgraded") as connection:
        schema = schema_version(connection)
    if schema is not None and _FIRST < schema < SCHEMA_VERSION:
        verify_chain(ledger)
        verify_rows(ledger)


def _begin_log(connection: Connection, database: Database) -> str:
    """From the schema whose log told less: it ends, and another begins. Where the copy is."""
    seal_before(connection)
    chain = verify_before(connection, upgraded=False)
    verify_rows_before(connection)
    kept = _keep(connection, database.place, _FIRST)
    crashpoint("upgrade.after_copy")
    migrate(connection)
    fill_edges(connection)
    tell_rows(connection, database.clock, os.urandom, _FIRST, chain)
    return kept


def _go_on(connection: Connection, ledger: Ledger, came_from: str) -> str:
    """From a schema whose code can use this one, so what it drives goes on meanwhile. Where the copy is."""
    kept = _keep(connection, ledger.database.place, came_from)
    crashpoint("upgrade.after_copy")
    migrate(connection)
    author = Author(DRIVER, new_request(ledger.entropy), ledger.auth, ledger.entropy)
    journal = Journal(connection, author, ledger.clock, ledger.project)
    journal.tell(UPGRADED, "ledger", facts={"from": came_from, "to": SCHEMA_VERSION})
    journal.flush()
    return kept


def _refuse_driven(connection: Connection, now: float, alive: Callable[[str], bool]) -> None:
    """An older Posttrain that goes on writing would write what nobody reads any more."""
    held = "SELECT id, lease_owner FROM runs WHERE lease_owner IS NOT NULL AND lease_expires > :now ORDER BY id"
    for run, owner in connection.execute(text(held), {"now": now}):
        if alive(str(owner)):
            raise ConflictError(
                f"run {run}: is being driven by {owner}, an older Posttrain; end that command (its jobs go on), then "
                "run `posttrain upgrade` again"
            )


def _keep(connection: Connection, place: str | None, schema: str) -> str:
    """Copy the ledger as it is under the write lock, or those of all tables; where the copy is."""
    if connection.dialect.name == "sqlite":
        return str(_keep_file(Path(str(place)), schema))
    number = 1
    there = text("SELECT 1 FROM pg_namespace WHERE nspname = :name")
    while connection.execute(there, {"name": (name := f"before_{schema}_upgrade_{number}")}).first():
        number += 1
    connection.execute(text(f'CREATE SCHEMA "{name}"'))
    for table in inspect(connection).get_table_names():
        connection.execute(text(f'CREATE TABLE "{name}"."{table}" AS TABLE "{table}"'))
    return f"database schema {name}"


def _keep_file(ledger: Path, schema: str) -> Path:
    """A copy beside the ledger, whole or not there; one that an earlier, failed upgrade left is another file."""
    number = 1
    while (kept := ledger.with_name(f"{ledger.stem}-{schema}-{number}{ledger.suffix}")).exists():
        number += 1
    copy_ledger(ledger, kept)
    return kept
