"""The ledger, its hosts, the store lock that they share, and counts that describe a ledger.

The ledger contains runs, stages, attempts, assets, releases, and the events that record their changes. `Stores` are a
ledger and its blobs, for planning, judging, releasing and queries; nothing here starts or observes a job.

Reading: each method of `Ledger` reads a separate snapshot; `snapshot()` gives several reads of one moment.
Writing: `transaction(actor)`. The block must be short and only write, because on SQLite it holds the only write lock.

A host is a workspace folder, with its jobs and drivers. All hosts share the ledger.

A job runs on the host on which its attempt was planned, and only that host's drivers drive the run (`work.affinity`). A
host sends periodic heartbeats. If a host has been silent for long, its runs continue on other hosts, except for runs
with a job that may still be alive.

On PostgreSQL, times are those of the database server, because the clocks of the hosts need not agree.

The lock covers an artifact store that several hosts of a ledger share.

The counts are for the monitoring of a server: they cover all projects, without the names of the projects. Three
statements compute the counts, at a cost that does not grow with the history: large sets are counted up to `MOST`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import ColumnElement, Connection, Float, Select, case, exists, func, literal, select, text, update

from posttrain._version import __version__
from posttrain.domain.errors import ConflictError, InfrastructureError
from posttrain.domain.lifecycle import RUN, AttemptState, is_final
from posttrain.domain.manifest import Manifest, manifest_from_json
from posttrain.domain.ports import BlobStore, Clock
from posttrain.domain.records import DEFAULT_PROJECT, AttemptRecord, RunRecord, StageRecord
from posttrain.store import journal
from posttrain.store.atomic import DELETES, PATIENCE, STORES, FileLock
from posttrain.store.database import SERVER_TIME, Database, LostAnswerError, SystemClock, moment, now_in
from posttrain.store.journal import Author, Entropy, new_request
from posttrain.store.schema import attempts, cursors, events, hosts, runs, sinks, tree_head, unsealed, work
from posttrain.store.snapshot import Snapshot
from posttrain.store.transaction import Transaction

BEAT_SECONDS = 10.0  # seconds between two heartbeats of a host
GONE_SECONDS = 60.0  # seconds of silence after which a host counts as dead
_SAY = (
    "INSERT INTO hosts (id, name, url, server, version, seen_at) "
    "VALUES (:id, :name, :url, :server, :version, {now}) "
    "ON CONFLICT (id) DO UPDATE SET name = excluded.name, version = excluded.version, seen_at = excluded.seen_at"
)
_AND_SERVER = ", url = excluded.url, server = excluded.server"
_ENDED = [state for state in AttemptState if is_final("attempt", state)]
_KEY = 0x706F7375  # key of PostgreSQL's advisory lock
MOST = 100_000  # maximum of every count
_AT_ONCE = 1000  # maximum number of objects listed
DELIVERING, FAILING, PAUSED = "delivering", "failing", "paused"
P = ParamSpec("P")
R = TypeVar("R")
_DIGITS = 32  # hexadecimal digits of a transaction's id
_WRITTEN: ContextVar[list[Any] | None] = ContextVar("posttrain_written", default=None)
_HEAD = select(tree_head.c.size).scalar_subquery()
_STATE = case((sinks.c.paused != "", PAUSED), (cursors.c.failures > 0, FAILING), else_=DELIVERING)
_FAILS = case((sinks.c.paused == "", cursors.c.failures), else_=0)
_SINKS = (
    select(sinks.c.kind, _STATE.label("state"), func.count(), func.max(_HEAD - cursors.c.sequence), func.max(_FAILS))
    .outerjoin(cursors, (cursors.c.project == sinks.c.project) & (cursors.c.sink == sinks.c.name))
    .group_by(sinks.c.kind, _STATE)
)


@dataclass(frozen=True, slots=True)
class Host:
    """One host."""

    id: str
    name: str  # HOSTNAME:FOLDER
    url: str  # URL of the host's server, for other servers; empty: no server
    server: str  # the process of the host's server, HOSTNAME:PID:START
    version: str
    silent: float  # seconds since the host's last heartbeat

    @property
    def gone(self) -> bool:
        """Whether the host counts as dead."""
        return self.silent > GONE_SECONDS


class Hosts:
    """The hosts of one ledger, for use by one host."""

    def __init__(self, database: Database, clock: Clock, identity: str, name: str) -> None:
        self._database, self._clock, self.id, self.name = database, clock, identity, name
        self._said = -BEAT_SECONDS  # by this host's clock, which may jump
        self._lock = threading.Lock()

    def beat(self) -> None:
        """Write this host's heartbeat if one is due, and release the runs of dead hosts."""
        with self._lock:
            now = self._clock.now()
            if 0 <= now - self._said < BEAT_SECONDS:
                return
            self._said = now
        with self._database.write(across="a host has jobs of every project") as connection:
            self._say(connection)
            self._let_go(connection)

    def announce(self, url: str, server: str) -> None:
        """Record the URL and process of this host's server, for other servers; empty: the server has ended."""
        with self._database.write() as connection:
            self._say(connection, (url, server))

    def all(self) -> list[Host]:
        """Return every host that ever sent a heartbeat, including this one, by name."""
        with self._database.read() as connection:
            query = select(hosts, (now_in(connection, self._clock) - hosts.c.seen_at).label("silent")).order_by(
                hosts.c.name, hosts.c.id
            )
            return [
                Host(row.id, row.name, row.url, row.server, row.version, max(0.0, float(row.silent)))
                for row in connection.execute(query)
            ]

    def _say(self, connection: Connection, serving: tuple[str, str] | None = None) -> None:
        at = moment(connection, self._clock)
        now = ":moment" if at else "EXTRACT(EPOCH FROM clock_timestamp())"
        url, server = serving or ("", "")
        values = {"id": self.id, "name": self.name, "url": url, "server": server, "version": __version__, **at}
        connection.execute(text(_SAY.format(now=now) + ("" if serving is None else _AND_SERVER)), values)

    def _let_go(self, connection: Connection) -> None:
        """Release the runs of dead hosts, except runs with an attempt that may still be alive."""
        gone = select(hosts.c.id).where(hosts.c.seen_at < now_in(connection, self._clock) - GONE_SECONDS)
        live = exists().where(attempts.c.run_id == work.c.object, attempts.c.state.not_in(_ENDED))
        theirs = (work.c.kind == journal.RUN, work.c.affinity.in_(gone), ~live)
        again = work.c.wanted_version + 1
        connection.execute(update(work).where(*theirs).values(affinity=None, due_at=0.0, wanted_version=again))


def server_lives(database: Database, clock: Clock, process: str) -> bool:
    """Return whether a server's process on another machine may be alive, as the latest server of a live host.

    Args:
        process: HOSTNAME:PID:START.
    """
    with database.read() as connection:
        heard = hosts.c.seen_at >= now_in(connection, clock) - GONE_SECONDS
        return connection.execute(select(hosts.c.id).where(hosts.c.server == process, heard)).first() is not None


def host_of(database: Database, project: str, run_id: str) -> str | None:
    """Return the host of the newest job of a run of this project; None if there is no such job or run."""
    mine = (runs.c.project == project) & (runs.c.id == run_id)
    query = select(attempts.c.host).join(runs, runs.c.id == attempts.c.run_id).where(mine, attempts.c.host.is_not(None))
    newest = query.order_by(attempts.c.created_at.desc(), attempts.c.stage, attempts.c.number.desc()).limit(1)
    with database.read() as connection:
        return connection.execute(newest).scalar()


class LedgerLock:
    """The store lock of all hosts of a ledger in PostgreSQL: a file lock on each host, and a lock in the database.

    The lock in the database is released when its session ends. A thread that holds the store lock may take it shared
    again.
    """

    def __init__(self, path: Path, database: Database) -> None:
        self._file, self._database = FileLock(path), database
        self._local = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See `StoreLock.shared`."""
        if getattr(self._local, "held", False):
            yield
            return
        with self._file.shared(), self._database.locked(_KEY, alone=False, patience=PATIENCE, by=DELETES):
            self._local.held = True
            try:
                yield
            finally:
                self._local.held = False

    @contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """See `StoreLock.alone`."""
        with self._file.alone(patience), self._database.locked(_KEY, alone=True, patience=patience, by=STORES):
            yield


@dataclass(frozen=True, slots=True)
class SinkCounts:
    """The counts of the sinks of one kind."""

    states: Mapping[str, int]
    behind: int  # number of events that the slowest sink has not received
    failures: int  # maximum of consecutive failures of a sink that is not paused


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Counts that describe a ledger."""

    runs: Mapping[str, int]  # number of runs, by state
    due: int  # number of objects that wait for a driver
    oldest_due: float  # longest wait, in seconds, among objects with a due time
    at_once: frozenset[int]  # row ids of objects due immediately; the ledger does not record since when they are due
    leased: int
    expired: int  # number of expired leases that no driver has taken over
    dead: int  # number of objects set aside until a person resumes them
    sealed: int  # number of events
    unsealed: int
    oldest_unsealed: float  # age of the oldest unsealed event, in seconds
    sinks: Mapping[str, SinkCounts] = field(default_factory=dict)  # by kind


def ledger_counts(database: Database, clock: Clock) -> LedgerCounts:
    """Return the current counts of a ledger.

    Raises:
        WorkspaceError: the ledger cannot be reached.
        DeadlineError: the ledger answers too late.
    """
    here = clock.now()
    with database.read(across="numbers of the whole server") as connection:
        of_server = connection.dialect.name == "postgresql"  # the queue's times are by the server's clock
        now: ColumnElement[float] = SERVER_TIME if of_server else literal(here, Float(53))
        row = connection.execute(select(*_runs(), *_queue(now), *_log())).one()._mapping
        waiting = select(work.c.id).where(*_due(now), work.c.due_at == 0.0).order_by(work.c.id).limit(_AT_ONCE)
        at_once = frozenset(connection.execute(waiting).scalars())
        kinds: dict[str, SinkCounts] = {}
        for kind, state, number, behind, failures in connection.execute(_SINKS):
            known = kinds.get(kind, SinkCounts({}, 0, 0))
            kinds[kind] = SinkCounts(
                {**known.states, state: number}, max(known.behind, behind or 0), max(known.failures, failures or 0)
            )
    return LedgerCounts(
        runs={state: row[f"runs_{state}"] for state in RUN},
        due=row["due"],
        oldest_due=max(0.0, row["oldest_due"] or 0.0),
        at_once=at_once,
        leased=row["leased"],
        expired=row["expired"],
        dead=row["dead"],
        sealed=row["sealed"],
        unsealed=row["unsealed"],
        oldest_unsealed=max(0.0, here - row["unsealed_since"]) if row["unsealed_since"] is not None else 0.0,
        sinks=kinds,
    )


def _counted(query: Select[int], name: str) -> ColumnElement[int]:
    """Return the number of rows that a query finds, up to `MOST`."""
    return select(func.count()).select_from(query.limit(MOST).subquery()).scalar_subquery().label(name)


def _runs() -> list[ColumnElement[int]]:
    every = select(literal(1)).select_from(runs)
    return [_counted(every.where(runs.c.state == state), f"runs_{state}") for state in RUN]


def _queue(now: ColumnElement[float]) -> list[ColumnElement[float]]:
    """Return the columns that count rows of the queue, which has only rows of unfinished objects."""
    held = work.c.lease_owner.is_not(None)
    wanted = {
        "due": (select(func.count()), _due(now)),
        "oldest_due": (select(now - func.min(work.c.due_at)), (*_due(now), work.c.due_at > 0.0)),
        "leased": (select(func.count()), (held, work.c.lease_until > now)),
        "expired": (select(func.count()), (held, work.c.lease_until <= now)),
        "dead": (select(func.count()), (work.c.dead_at.is_not(None),)),
    }
    return [
        query.select_from(work).where(*where).scalar_subquery().label(name) for name, (query, where) in wanted.items()
    ]


def _due(now: ColumnElement[float]) -> tuple[ColumnElement[bool], ...]:
    return work.c.dead_at.is_(None), work.c.due_at <= now, work.c.lease_owner.is_(None)


def _log() -> list[ColumnElement[float]]:
    first = select(events.c.at).join(unsealed, unsealed.c.event == events.c.id).order_by(unsealed.c.event).limit(1)
    return [
        select(tree_head.c.size).scalar_subquery().label("sealed"),
        _counted(select(unsealed.c.event), "unsealed"),
        first.scalar_subquery().label("unsealed_since"),
    ]


def numbered(request: str, number: int) -> str:
    """Return the id of a request's transaction: 32 hexadecimal digits, ending with its number, from 0."""
    return f"{request}{number:0{_DIGITS - len(request)}x}"


def _read(query: Callable[Concatenate[Snapshot, P], R]) -> Callable[Concatenate[Ledger, P], R]:
    """Return the method of `Ledger` that runs one read in a separate snapshot."""

    def asked(self: Ledger, /, *words: P.args, **options: P.kwargs) -> R:
        with self.snapshot() as now:
            found: R = getattr(now, query.__name__)(*words, **options)
        return found

    functools.update_wrapper(asked, query)
    return asked


class Ledger:
    """The ledger of one project in one database.

    Every method raises WorkspaceError (the database is read-only or damaged, or the disk is full) and DeadlineError
    (the database was locked for too long).

    Args:
        project: the project to which all reads and writes are limited.
        auth: how the actor was authenticated, for events.
        entropy: returns the given number of random bytes, for ids and salts.
        request: id of the request, from which numbered ids of the request's transactions are formed, for events and
            logs. Empty: each transaction has a random id.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        project: str = DEFAULT_PROJECT,
        entropy: Entropy = os.urandom,
        auth: str = "os",
        request: str = "",
    ) -> None:
        self.database = database.of(project)
        self.clock: Clock = clock or SystemClock()
        self.project, self.entropy, self.auth = project, entropy, auth
        self._request, self._numbers = request, itertools.count()
        self._principals: dict[str, str] = {}  # name of an earlier actor → principal id

    @contextmanager
    def transaction(self, actor: str) -> Iterator[Transaction]:
        """Open a write transaction, committed when the block ends and rolled back if the block raises.

        If the answer to the commit is lost, the ledger is read to find out whether the commit succeeded.

        Args:
            actor: the author whom every event names, e.g. `user:ann` or `reconciler`.

        Raises:
            InfrastructureError: the connection was lost and nothing was written.
            ConflictError: another process wrote the same rows; or the actor's name was erased since the last
                transaction and now names a different principal. The caller may repeat the transaction.
        """
        request = numbered(self._request, next(self._numbers)) if self._request else new_request(self.entropy)
        author = Author(actor, request, self.auth, self.entropy, self._principals)
        try:
            with self.database.write() as connection:
                transaction = Transaction(connection, author, self.clock, self.project)
                if self._request and request == numbered(self._request, 0):
                    transaction.refuse_repeated(request)
                yield transaction
                transaction.flush()
        except LostAnswerError as error:
            if not self._committed(author.request):
                raise InfrastructureError(
                    f"ledger {self.database.place}: the connection was lost before a commit; nothing was written, "
                    "run the command again"
                ) from error
        except ConflictError:
            self._principals.pop(actor, None)
            raise
        self._principals |= {name: found for name, found in transaction.principals.items() if name == actor}
        written = _WRITTEN.get()
        if written is not None:
            written += transaction.written

    @contextmanager
    def untold(self) -> Iterator[Connection]:
        """Open a write transaction for rows that no event records.

        Raises:
            InfrastructureError: the answer to the commit was lost; the caller must read again.
        """
        try:
            with self.database.write() as connection:
                yield connection
        except LostAnswerError as error:
            raise InfrastructureError(f"{error}; trying again") from error

    @contextmanager
    def written(self) -> Iterator[list[Any]]:
        """Yield a list of the run, stage and attempt records that this thread commits in the block."""
        found, outer = list[Any](), _WRITTEN.get()
        kept = _WRITTEN.set(found)
        try:
            yield found
        finally:
            _WRITTEN.reset(kept)
            if outer is not None:
                outer += found

    def forget_principals(self) -> None:
        """Drop the cached ids of principals: after an erasure, the same name is a different principal."""
        self._principals.clear()

    def _committed(self, request: str) -> bool:
        """Return whether a transaction whose answer was lost was committed."""
        with self.snapshot() as now:
            return now.has_request(request)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Open a snapshot: several reads of one moment."""
        with self.database.read() as connection:
            yield Snapshot(connection, self.project)

    run = _read(Snapshot.run)
    runs = _read(Snapshot.runs)
    find_run = _read(Snapshot.find_run)
    stages = _read(Snapshot.stages)
    attempts = _read(Snapshot.attempts)
    asset = _read(Snapshot.asset)
    assets = _read(Snapshot.assets)
    assets_by_digest = _read(Snapshot.assets_by_digest)
    find_artifact = _read(Snapshot.find_artifact)
    sink = _read(Snapshot.sink)
    channel = _read(Snapshot.channel)
    channel_record = _read(Snapshot.channel_record)
    channel_records = _read(Snapshot.channel_records)
    deployments = _read(Snapshot.deployments)
    events_about = _read(Snapshot.events_about)
    history = _read(Snapshot.history)
    asset_status = _read(Snapshot.asset_status)
    notes = _read(Snapshot.notes)
    signals = _read(Snapshot.signals)
    quarantine = _read(Snapshot.quarantine)
    channels = _read(Snapshot.channels)
    stages_by_key = _read(Snapshot.stages_by_key)
    cached_stage = _read(Snapshot.cached_stage)
    computed = _read(Snapshot.computed)
    events = _read(Snapshot.events)
    images = _read(Snapshot.images)
    projects = _read(Snapshot.projects)
    roles = _read(Snapshot.roles)
    roles_of = _read(Snapshot.roles_of)
    tokens = _read(Snapshot.tokens)
    token_of = _read(Snapshot.token_of)
    artifacts = _read(Snapshot.artifacts)
    pending_events = _read(Snapshot.pending_events)

    def close(self) -> None:
        """Close the database."""
        self.database.close()


@dataclass(frozen=True, slots=True)
class Stores:
    """Ledger and blobs, with the clock and the actor of their writes."""

    ledger: Ledger
    blobs: BlobStore
    clock: Clock
    actor: str  # the acting principal, by the name in the audit log

    def manifest(self, run: RunRecord) -> Manifest:
        """Return the run's locked manifest.

        Raises:
            IntegrityError: the manifest's bytes no longer match the digest.
        """
        return manifest_from_json(json.loads(self.blobs.get(run.manifest_digest)))

    def update_stage(self, stage: StageRecord, **changes: Any) -> StageRecord:
        """Change a stage in a separate transaction; see `Transaction.update_stage`."""
        with self.ledger.transaction(self.actor) as transaction:
            return transaction.update_stage(stage, **changes)

    def update_attempt(self, attempt: AttemptRecord, **changes: Any) -> AttemptRecord:
        """Change an attempt in a separate transaction; see `Transaction.update_attempt`."""
        with self.ledger.transaction(self.actor) as transaction:
            return transaction.update_attempt(attempt, **changes)
