"""Erasure of words: people's texts and names are deleted; the rest of each event remains and can still be verified.

The words of an event are in a separate payload, which the envelope names by a salted digest. An erasure deletes the
payload with its salt, empties the same words in the rows, and appends events that list the deleted payloads and the
remaining words of every affected row, all in one transaction. States, numbers, digests, ids and names of runs, assets
and channels are kept permanently.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, Text, bindparam, delete, func, or_, select, tuple_, type_coerce, update

from posttrain.domain.errors import InputError, NotFoundError, WorkspaceError
from posttrain.domain.ids import NOBODY
from posttrain.domain.lifecycle import RunState
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import IMPORTED
from posttrain.store.database import schema_version
from posttrain.store.external import URI, VERSION
from posttrain.store.journal import CHANGED, ERASED, TABLES, Author, Change, Journal, new_request
from posttrain.store.ledger import Ledger
from posttrain.store.schema import (
    SCHEMA_VERSION,
    approval_requests,
    approvals,
    events,
    looks,
    payloads,
    principals,
    requests,
    runs,
    work,
)
from posttrain.store.writer import end_access

_KEPT: Mapping[str, set[str]] = {  # words that readers and later stages require
    "attempts": {"folder", "handle"},
    "holds": {"reason"},
    "assets": {
        "entry",
        "dialect",
        "source",
        "source_digest",
        "prompts_digest",
        "run",
        "stage",
        "output",
        IMPORTED,
        URI,
        VERSION,
    },
}
_NEVER = ("workspace.bound", ERASED)  # events with the database's owner and with the reasons for erasures
_GOING_ON = (RunState.PENDING, RunState.RUNNING, RunState.STOPPING)
_EVENTS, _ROWS = 1000, 200  # maximum numbers recorded in one event
_Row = tuple[str, tuple[Any, ...]]  # table and key
_Left = Callable[[_Row, str, Any], Any]  # row, column, value → remaining value


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of an erasure."""

    subject: str  # subject of the erasure's event
    events: int  # number of events whose words were deleted
    rows: int  # number of rows that lost words
    overwritten: bool  # whether no erased word is left in the database's file


@dataclass(frozen=True, slots=True)
class _Told:
    """An event that has words, and the rows whose words it records."""

    id: int
    words: str
    rows: frozenset[_Row]


def erase_subject(ledger: Ledger, actor: str, subject: str, reason: str) -> Erased:
    """Erase the words of a run with its stages and attempts, or of an asset version.

    Raises:
        InputError: the run has not ended.
        WorkspaceError: the ledger is of a newer version of Posttrain.
    """
    mine = events.c.project == ledger.project
    with ledger.database.write(across="names are erased in every project") as connection:
        _refuse_newer(connection)
        state = connection.execute(select(runs.c.state).where(runs.c.id == subject)).scalar()
        if state in _GOING_ON:
            raise InputError(f"run {subject}: is {state} and still writes text; stop it first")
        found = {one.id: one for one, _ in _told(connection, mine & _below(events.c.subject, subject))}
        rows = {row for one in found.values() for row in one.rows if _belongs(row, subject)}
        rows |= _looks(connection, subject) | _approvals(connection, subject)
        for one, _ in _told(connection, mine & (events.c.kind == "channel.looked")):
            its = {row for row in one.rows if row in rows or _belongs(row, subject)}
            if its:
                found[one.id] = one
                rows |= its

        def left(row: _Row, column: str, value: Any) -> Any:
            return _functional(row[0], column, value) if row in rows else value

        _empty_answers(connection)
        _empty_work(connection, (work.c.project == ledger.project) & _below(work.c.object, subject))
        done = _erase(connection, _journal(connection, ledger, actor), subject, reason, list(found.values()), left)
    return _finish(ledger, subject, done)


def erase_principal(ledger: Ledger, actor: str, name: str, reason: str) -> Erased:
    """Erase a principal's name (`user:ada`: `ada`) wherever an event or a row contains it as a word.

    The principal's roles are withdrawn and its tokens are revoked, because an erased name must not keep access.

    Raises:
        NotFoundError: there is no principal with this name.
        InputError: the reason contains the name.
        ConflictError: the principal is the last admin of a project.
        WorkspaceError: the ledger is of a newer version of Posttrain.
    """
    word = re.compile(rf"(?<!\w){re.escape(name.partition(':')[2])}(?!\w)")
    if word.search(reason):
        raise InputError(f"the reason must not contain {name!r}, which is erased; remove the name")
    with ledger.database.write(across="names are erased in every project") as connection:
        _refuse_newer(connection)
        principal = connection.execute(select(principals.c.id).where(principals.c.name == name)).scalar()
        if principal is None:
            raise NotFoundError(
                f"there is no principal {name!r}; `posttrain asset ls` and `get CHANNEL` show who acted"
            )
        end_access(connection, _author(ledger, actor), ledger.clock, principal)
        _empty_answers(connection)
        journal = _journal(connection, ledger, actor)
        mentioning = [one for one, body in _told(connection) if word.search(body)]

        def left(row: _Row, column: str, value: Any) -> Any:
            if row == ("principals", (principal,)):
                return f"{NOBODY}{principal}"
            return _without(word, row[0], column, value)

        troubles = connection.execute(select(work.c.id, work.c.error, work.c.traceback).where(work.c.error != "")).all()
        for part in _parts([row.id for row in troubles if word.search(f"{row.error}\n{row.traceback}")], _ROWS):
            _empty_work(connection, work.c.id.in_(part))
        done = _erase(connection, journal, principal, reason, mentioning, left)
    ledger.forget_principals()
    return _finish(ledger, principal, done)


def _refuse_newer(connection: Connection) -> None:
    """Reject a ledger of a newer version of Posttrain, which may have words in tables unknown to this version.

    Raises:
        WorkspaceError: the ledger is of a newer version of Posttrain.
    """
    found = schema_version(connection)
    if found is not None and found > SCHEMA_VERSION:
        raise WorkspaceError(
            f"the ledger has schema {found}, and this Posttrain ({SCHEMA_VERSION}) cannot find all of its text; "
            "erase with the newer version of Posttrain"
        )


def _below(column: Any, subject: str) -> Any:
    return or_(column == subject, func.substr(column, 1, len(subject) + 1) == f"{subject}/")


def _empty_answers(connection: Connection) -> None:
    """Empty the answers stored for repeated requests, because they may contain the text; the requests stay recorded."""
    connection.execute(update(requests).where(requests.c.answer.is_not(None)).values(answer=None))


def _empty_work(connection: Connection, where: Any) -> None:
    """Empty the errors and tracebacks in the work queue, which no event records."""
    connection.execute(update(work).where(where).values(error="", traceback=""))


def _author(ledger: Ledger, actor: str) -> Author:
    return Author(actor, new_request(ledger.entropy), ledger.auth, ledger.entropy)


def _journal(connection: Connection, ledger: Ledger, actor: str) -> Journal:
    journal = Journal(connection, _author(ledger, actor), ledger.clock, ledger.project)
    assert journal.own  # the author is read before its name may be erased
    return journal


def _told(connection: Connection, where: Any = None) -> Iterator[tuple[_Told, str]]:
    """Yield events with words that may be erased, each with the text of its payload."""
    columns = (events.c.id, events.c.words, type_coerce(events.c.audited, Text), type_coerce(payloads.c.body, Text))
    query: Select[Any] = select(*columns).join(payloads, payloads.c.event == events.c.id)
    query = query.where(events.c.kind.not_in(_NEVER), *([] if where is None else [where]))
    for number, words, audited, body in connection.execute(query.execution_options(yield_per=_EVENTS)):
        rows = frozenset((row[1], tuple(row[2])) for row in json.loads(audited).get("rows", ()) if TABLES[row[1]].words)
        yield _Told(number, words, rows), body


def _looks(connection: Connection, run_id: str) -> set[_Row]:
    key = (looks.c.project, looks.c.channel, looks.c.number)
    return {("looks", tuple(row)) for row in connection.execute(select(*key).where(looks.c.run_id == run_id))}


def _approvals(connection: Connection, run_id: str) -> set[_Row]:
    key = (approvals.c.project, approvals.c.request, approvals.c.principal)
    same = (approval_requests.c.project == approvals.c.project) & (approval_requests.c.digest == approvals.c.request)
    mine = select(*key).join(approval_requests, same).where(approval_requests.c.run_id == run_id)
    return {("approvals", tuple(row)) for row in connection.execute(mine)}


def _belongs(row: _Row, subject: str) -> bool:
    table, key = row
    if table in ("assets", "asset_status"):
        return f"{key[1]}:{key[2]}@{key[3]}" == subject
    if table in ("signals", "notes"):
        return bool(key[1] == subject)
    return table in ("runs", "stages", "attempts") and key[0] == subject


def _erase(
    connection: Connection, journal: Journal, subject: str, reason: str, found: Sequence[_Told], left: _Left
) -> tuple[int, int]:
    """Delete payloads, empty rows, and record both in events; return the numbers of events and rows."""
    changes: list[Change] = []
    fewer = 0
    for table in TABLES:
        for part in _parts(sorted({row for one in found for row in one.rows if row[0] == table}, key=str), _ROWS):
            changed, told = _empty_rows(connection, part, left)
            fewer, changes = fewer + changed, changes + told
    for part in _parts([one.id for one in found], _EVENTS):
        connection.execute(delete(payloads).where(payloads.c.event.in_(part)))
    words = sorted(one.words for one in found)
    for place in range(0, max(len(words), 1 if changes else 0), _EVENTS):
        journal.tell(ERASED, subject, facts={"erased": words[place : place + _EVENTS]}, said={"reason": reason})
    for part in _parts(changes, _ROWS):
        journal.tell(ERASED, subject, *part, said={"reason": reason})
    journal.flush()
    crashpoint("erase.before_commit")
    return len(found), fewer


def _empty_rows(connection: Connection, rows: Sequence[_Row], left: _Left) -> tuple[int, list[Change]]:
    """Write the remaining words of one table's rows; return the number of rows that lost words, and the changes."""
    spec = TABLES[rows[0][0]]
    table, columns = spec.table, sorted(spec.words)
    here = tuple_(*table.primary_key.columns).in_([key for _, key in rows])
    query = select(*table.primary_key.columns, *(table.c[name] for name in columns)).where(here)
    told, writes = [], []
    for found in connection.execute(query).mappings().all():
        key = {name: found[name] for name in spec.key}
        row = (table.name, tuple(key.values()))
        values = {name: left(row, name, found[name]) for name in columns}
        told.append(Change(CHANGED, table.name, key, values))
        if any(values[name] != found[name] for name in columns):
            writes.append({f"was_{name}": value for name, value in key.items()} | values)
    if writes:
        same = [table.c[name] == bindparam(f"was_{name}") for name in spec.key]
        connection.execute(update(table).where(*same).values({name: bindparam(name) for name in columns}), writes)
    return len(writes), told


def _functional(table: str, column: str, value: Any) -> Any:
    """Return the value that remains of an emptied column: its numbers, and the words that later work requires."""
    kept = _KEPT.get(table, set())
    if isinstance(value, Mapping):
        return {name: one for name, one in value.items() if name in kept or isinstance(one, (int, float))}
    return value if column in kept or value is None else _nothing(table, column)


def _without(word: re.Pattern[str], table: str, column: str, value: Any) -> Any:
    """Return the value that remains of a column from which one word is erased."""
    kept = _KEPT.get(table, set())
    if isinstance(value, Mapping):
        said = {name: json.dumps(one, ensure_ascii=False) for name, one in value.items()}
        return {name: one for name, one in value.items() if name in kept or not word.search(said[name])}
    if column in kept or not (isinstance(value, str) and word.search(value)):
        return value
    return _nothing(table, column)


def _nothing(table: str, column: str) -> str | None:
    return None if TABLES[table].table.c[column].nullable else ""


def _finish(ledger: Ledger, subject: str, done: tuple[int, int]) -> Erased:
    crashpoint("erase.after_commit")
    return Erased(subject, *done, ledger.database.overwrite())


def _parts(whole: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    yield from (whole[place : place + size] for place in range(0, len(whole), size))
