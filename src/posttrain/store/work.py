"""The work queue, which records when a driver is to observe each object, and the cursors of sinks.

A row is one object: a `run` (its id), a `stage` (RUN/NAME) or a `sweep` (its executor). Writers schedule the object in
the transaction that creates the object's work. A driver claims the object with a lease, observes the object, and gives
it back with the time of the next observation. If the object was scheduled in between, it is observed again: on
give-back, `wanted_version` is compared with its value at the claim. Rows contain nothing that the ledger's audited rows
lack, so the driver of an object can recreate a lost row.

On PostgreSQL, times are those of the database server, because the clocks of the hosts need not agree; elsewhere they
are those of the ledger's clock.

A cursor records the position of a sink, the process that delivers to it, and the last failure. No event records
cursors. A lost cursor is recreated at the position where its sink was added: the receiver gets some events twice, and
misses no event.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Float,
    FromClause,
    Select,
    Update,
    bindparam,
    collate,
    delete,
    exc,
    func,
    insert,
    or_,
    select,
    union_all,
    update,
)

from posttrain.domain.errors import NotFoundError, StaleWriteError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRows
from posttrain.domain.sinks import Cursor
from posttrain.store.database import SERVER_TIME, Database, moment, now_in
from posttrain.store.journal import RUN, STAGE, settle_at, wake
from posttrain.store.ledger import Ledger
from posttrain.store.rows import plain, to_record
from posttrain.store.schema import cursors, keyed, runs, stages, work
from posttrain.store.scope import Scope
from posttrain.store.snapshot import Snapshot, rows_on
from posttrain.store.writer import FREE, FRESH

NEVER = 1e11  # seconds; the object is not due until a writer schedules it
_TOKEN_BYTES = 16
_TRACEBACK = 20_000  # characters kept
LEASE_SECONDS = 120.0  # seconds, longer than a delivery; each delivery renews the lease


_QUEUED = ("Work", "Trouble")  # a run's row of the queue, and the row of a failing stage


@dataclass(frozen=True, slots=True)
class Work:
    """The row of one object to observe, as read."""

    id: int
    kind: str
    object: str
    due_at: float
    priority: int
    wanted_version: int
    lease_owner: str | None
    lease_token: str | None  # token of this claim; a different token means that the lease was lost
    lease_until: float | None
    failures: int  # number of consecutive observations that raised
    failed_since: float | None
    error: str  # one-line error of the last failure
    traceback: str
    dead_at: float | None  # time at which the object was set aside
    affinity: str | None = None  # the only host whose drivers may observe the object
    # seconds, by the clock that set these times; a host's clock may differ from the database's
    due_in: float = field(default=0.0, compare=False)
    failed_for: float | None = field(default=None, compare=False)
    lease_in: float | None = field(default=None, compare=False)


class WorkQueue:
    """The queue of one project, for one driver.

    Args:
        owner: `host:pid:start` of this process.
        alive: returns whether another owner may be alive; a dead owner loses its leases immediately.
        lease: seconds for which a claim is valid without renewal.
        host: the host whose jobs this driver can reach, if the ledger has several hosts; None: it has one host.
    """

    def __init__(
        self,
        ledger: Ledger,
        owner: str,
        alive: Callable[[str], bool] = lambda owner: True,
        lease: float = 15.0,
        host: str | None = None,
    ) -> None:
        self._ledger, self.owner, self._alive, self.lease, self._host = ledger, owner, alive, lease, host

    def due(self, objects: Collection[str] | None = None) -> set[str]:
        """Return the objects, of these or of all, that `claim` would find, in one read-only statement."""
        with self._ledger.database.read() as connection:
            now = self._now(connection)
            return set(
                connection.execute(select(work.c.object).where(*self._open(now, objects), self._free(now))).scalars()
            )

    def claim(self, objects: Collection[str] | None = None, limit: int = 1, *, early: bool = False) -> list[Work]:
        """Claim due objects that are free or already claimed by this owner; the most urgent first.

        Args:
            objects: only these objects; None: any.
            early: whether to claim objects that are not due as well.

        Raises:
            InfrastructureError: the answer was lost; objects that were claimed have this owner, which may claim them
                again.
        """
        token = self._ledger.entropy(_TOKEN_BYTES).hex()
        with self._ledger.untold() as connection:
            now = self._now(connection)
            open_ones = select(work.c.id).where(*self._open(now, objects, early=early), self._free(now))
            chosen = open_ones.order_by(work.c.priority.desc(), work.c.due_at, work.c.id).limit(limit)
            if connection.dialect.name == "postgresql":
                chosen = chosen.with_for_update(skip_locked=True)
            values = {"lease_owner": self.owner, "lease_token": token, "lease_until": now + self.lease}
            taken = update(work).where(work.c.id.in_(chosen)).values(values).returning(*_told(now))
            rows = [_work(row) for row in connection.execute(taken)]
        return sorted(rows, key=lambda one: (-one.priority, one.due_at, one.id))

    def look(self, kind: str, name: str) -> Work | None:
        """Return the current row of an object; None: it has no row."""
        with self._ledger.database.read() as connection:
            at = self._moment(connection)
            values = {"of_project": self._ledger.project, "of_kind": kind, "of_object": name, **at}
            row = connection.execute(_looking(not at), values).one_or_none()
            return None if row is None else _work(row)

    def of_run(self, run_id: str) -> dict[str, Work]:
        """Return the row of a run and those of its stages, by object."""
        with self._ledger.database.read() as connection:
            at = self._moment(connection)
            below = {"within": f"{run_id}/", "length": len(run_id) + 1}
            values = {"of_project": self._ledger.project, "of_object": run_id, **below, **at}
            return {row.object: _work(row) for row in connection.execute(_about(not at), values)}

    def look_at(self, run_id: str) -> tuple[dict[str, Work], RunRows]:
        """Return the result of `of_run` without tracebacks, and the run's other rows, in one statement.

        Raises:
            UnreadableColumnError: a row of the run is damaged.
            NotFoundError: there is no such run.
        """
        with self._ledger.database.read() as connection:
            at = self._moment(connection)
            rows, found = Snapshot(connection, self._ledger.project).rows_in(
                run_id, _whole(connection.dialect.name, not at), at
            )
        queued = [_queued(row._mapping, kind) for row in found for kind in _QUEUED]
        return {one.object: one for one in queued if one is not None}, rows

    def renew(self) -> None:
        """Renew all leases of this owner for another `lease` seconds."""
        with self._ledger.untold() as connection:
            mine = self._in_order(connection, work.c.lease_owner == self.owner, self._project)
            connection.execute(update(work).where(mine).values(lease_until=self._now(connection) + self.lease))

    def give_back(self, one: Work, after: float = NEVER, *, hold: bool = False) -> bool:
        """Record a successful observation of an object, and make the object due again after `after` seconds.

        Args:
            hold: whether this owner keeps the lease.

        Returns:
            Whether the observation was recorded; False if the object was scheduled in between, or has a different
            owner.
        """
        with self._ledger.untold() as connection:
            at = self._moment(connection)
            seen = {"of_id": one.id, "of_token": one.lease_token, "seen": one.wanted_version, "after": after}
            values = {**seen, "of_project": self._ledger.project, **at}
            done = connection.execute(_giving(not at, hold), values).rowcount
            if not done and not hold:
                connection.execute(update(work).where(self._project, *_held(one)).values(_FREE))
        return bool(done)

    def finish(self, run_id: str) -> None:
        """Delete the row of an ended run from the queue, unless another process continues the run at the same time."""
        with self._ledger.untold() as connection:
            self._finish(connection, run_id)

    def failed(
        self, kind: str, name: str, error: str, trace: str, again_after: float | None, held: Work | None = None
    ) -> Work:
        """Record a failed observation: the object is due again after `again_after` seconds, or set aside (None).

        Args:
            held: the claim under which the object was observed; None: it was observed as a part of another object.

        Returns:
            The object's row, which this call may have created.

        Raises:
            StaleWriteError: a different owner has the object, and its observation counts.
        """
        with self._ledger.untold() as connection:
            now = self._now(connection)
            if held is None:
                wake(connection, self._ledger.project, kind, [name], NEVER)
            since = func.coalesce(work.c.failed_since, now)
            values = {
                "failures": work.c.failures + 1,
                "failed_since": since,
                "error": plain(error),
                "traceback": plain(trace[-_TRACEBACK:]),
                "due_at": now + (NEVER if again_after is None else again_after),
                "dead_at": now if again_after is None else None,
                **_FREE,
            }
            mine = [self._named(kind, [name])] if held is None else [self._project, *_held(held)]
            changed = connection.execute(update(work).where(*mine).values(values).returning(*_told(now))).one_or_none()
            if changed is None:
                raise StaleWriteError(f"{kind} {name}: another driver has the lease")
            row = _work(changed)
            self._finish(connection, name.partition("/")[0])  # another driver may have ended the run
            return row

    def over(self, kind: str, name: str) -> None:
        """Delete the row of an object whose observations no longer fail."""
        with self._ledger.untold() as connection:
            connection.execute(delete(work).where(self._named(kind, [name])))

    def revive(self, kind: str, name: str) -> None:
        """Schedule an object that was set aside.

        Raises:
            NotFoundError: no object with this name was set aside.
        """
        with self._ledger.untold() as connection:
            now = self._now(connection)
            aside = (self._named(kind, [name]), work.c.dead_at.is_not(None))
            again = work.c.wanted_version + 1
            values = {"dead_at": None, "due_at": now, "failures": 0, "failed_since": None, "wanted_version": again}
            if not connection.execute(update(work).where(*aside).values(values)).rowcount:
                raise NotFoundError(f"no object named {name} was set aside; posttrain dead lists the objects set aside")
            if kind == STAGE:
                wake(connection, self._ledger.project, RUN, [name.partition("/")[0]])

    def wake(self, kind: str, names: Collection[str], after: float = 0.0) -> None:
        """Schedule objects to be observed after `after` seconds."""
        with self._ledger.untold() as connection:
            due = self._ledger.clock.now() + after if after else 0.0
            wake(connection, self._ledger.project, kind, names, due)
            for name in names if kind == RUN else ():
                self._finish(connection, name)

    def leave_to(self, run_id: str, host: str | None) -> None:
        """Leave a run whose job is on another host to that host; None: the host is unknown."""
        with self._ledger.untold() as connection:
            settle_at(connection, self._ledger.project, run_id, host)
        self.release([run_id])

    def release(self, names: Collection[str] | None = None) -> None:
        """Release this owner's objects, so that other drivers need not wait until the leases expire."""
        with self._ledger.untold() as connection:
            named = [] if names is None else [work.c.object.in_(names)]
            mine = self._in_order(connection, work.c.lease_owner == self.owner, self._project, *named)
            connection.execute(update(work).where(mine).values(_FREE))

    def succeed_the_dead(self) -> int:
        """Release the leases of dead owners; return the number of freed objects."""
        with self._ledger.database.read() as connection:
            others = select(work.c.lease_owner).where(self._project, work.c.lease_owner.is_not(None)).distinct()
            owners = connection.execute(others).scalars().all()
        dead = [owner for owner in owners if owner != self.owner and not self._alive(owner)]
        if not dead:
            return 0
        with self._ledger.untold() as connection:
            theirs = (self._project, work.c.lease_owner.in_(dead))
            return connection.execute(update(work).where(self._in_order(connection, *theirs)).values(_FREE)).rowcount

    def rows(self, kind: str | None = None, within: str | None = None, *, dead: bool = False) -> list[Work]:
        """Return rows of the queue, in the order of objects.

        Args:
            within: id of a run; only its stages are returned.
            dead: only objects that were set aside.
        """
        values: dict[str, Any] = {"of_project": self._ledger.project}
        if kind is not None:
            values["of_kind"] = kind
        if within is not None:
            values |= {"within": f"{within}/", "length": len(within) + 1}
        with self._ledger.database.read() as connection:
            at = self._moment(connection)
            return [
                _work(row)
                for row in connection.execute(
                    _listing(not at, kind is not None, within is not None, dead), {**values, **at}
                )
            ]

    def _in_order(self, connection: Connection, *where: ColumnElement[bool]) -> ColumnElement[bool]:
        """Return the condition for these rows; on PostgreSQL, lock them in `wake`'s order, to prevent deadlocks."""
        ids = select(work.c.id).where(*where)
        if connection.dialect.name == "postgresql":
            ids = ids.order_by(work.c.kind, collate(work.c.object, "C")).with_for_update()
        return work.c.id.in_(ids)

    def _finish(self, connection: Connection, run_id: str) -> None:
        row = self._named(RUN, [run_id])
        seen = connection.execute(select(work.c.wanted_version).where(row)).scalar()
        state = connection.execute(
            Scope(self._ledger.project).select(runs, runs.c.state).where(runs.c.id == run_id)
        ).scalar()
        if state is not None and is_final("run", str(state)):
            connection.execute(delete(work).where(row, work.c.wanted_version == seen))
            connection.execute(
                delete(work).where(self._project, func.substr(work.c.object, 1, len(run_id) + 1) == f"{run_id}/")
            )

    @property
    def _project(self) -> ColumnElement[bool]:
        return work.c.project == self._ledger.project

    def _named(self, kind: str, names: Sequence[str]) -> ColumnElement[bool]:
        return self._project & (work.c.kind == kind) & work.c.object.in_(names)

    def _open(
        self, now: ColumnElement[float], objects: Collection[str] | None, *, early: bool = False
    ) -> list[ColumnElement[bool]]:
        found = [self._project, work.c.dead_at.is_(None), work.c.kind != STAGE]
        if objects is not None:
            found.append(work.c.object.in_(sorted(objects)))
        return found if early else [*found, work.c.due_at <= now]

    def _free(self, now: ColumnElement[float]) -> ColumnElement[bool]:
        mine = work.c.lease_owner == self.owner
        return _here(self._host) & or_(work.c.lease_owner.is_(None), mine, work.c.lease_until <= now)

    def _now(self, connection: Connection) -> ColumnElement[float]:
        return now_in(connection, self._ledger.clock)

    def _moment(self, connection: Connection) -> dict[str, float]:
        return moment(connection, self._ledger.clock)


def open_runs(database: Database, host: str | None = None, owner: str = "") -> dict[str, list[str]]:
    """Return, by project, the runs that a driver has to observe now or later, the most urgent first.

    Args:
        host: the caller's host; runs that only another host's drivers may observe, or that another owner holds, are
            left out.
        owner: the owner of the caller's leases.
    """
    found: dict[str, list[str]] = {}
    query = select(work.c.project, work.c.object).where(work.c.kind == RUN, work.c.dead_at.is_(None), _here(host))
    with database.read(across="one driver drives every project") as connection:
        if host is not None and connection.dialect.name == "postgresql":
            free = or_(work.c.lease_owner.is_(None), work.c.lease_owner == owner, work.c.lease_until <= SERVER_TIME)
            query = query.where(free)
        for project, run_id in connection.execute(query.order_by(work.c.priority.desc(), work.c.id)):
            found.setdefault(project, []).append(run_id)
    return found


_FREE: Mapping[str, Any] = {"lease_owner": None, "lease_token": None, "lease_until": None}


def let_go(database: Database) -> None:
    """Release every lease in a copied ledger, because the owners' leases are in the original ledger."""
    with database.write(across="a copy of a ledger") as connection:
        connection.execute(update(work).values(**_FREE))
        connection.execute(update(cursors).values(lease_owner=None, lease_until=None))


def _here(host: str | None) -> ColumnElement[bool]:
    """Return the condition for objects that a host's drivers may observe."""
    return or_(work.c.affinity.is_(None), work.c.affinity == host)


def _held(one: Work) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return work.c.id == one.id, work.c.lease_token == one.lease_token


def _told(now: ColumnElement[float], rows: FromClause = work) -> tuple[Any, ...]:
    """Return the columns of a row of `work`, and three times of the row in seconds relative to `now`."""
    far = (rows.c.due_at - now).label("due_in"), (rows.c.lease_until - now).label("lease_in")
    return *rows.c, *far, (now - rows.c.failed_since).label("failed_for")


def _work(row: Any) -> Work:
    return Work(**{name: row._mapping[name] for name in Work.__dataclass_fields__ if name in row._mapping})


def _queued(row: Mapping[Any, Any], kind: str) -> Work | None:
    """Return the queue row from the columns `KIND.…` of a joined row; None if there is no such queue row."""
    if row[f"{kind}.id"] is None:
        return None
    return Work(
        **{name: row[f"{kind}.{name}"] for name in Work.__dataclass_fields__ if name != "traceback"}, traceback=""
    )


# Statements that read a run are built once, because building them costs more than running them.


def _now_of(server: bool) -> ColumnElement[float]:
    return SERVER_TIME if server else bindparam("moment", type_=Float(53))


@functools.cache
def _looking(server: bool) -> Select[Any]:
    named = (work.c.kind == bindparam("of_kind")) & (work.c.object == bindparam("of_object"))
    return select(*_told(_now_of(server))).where(work.c.project == bindparam("of_project"), named)


@functools.cache
def _about(server: bool) -> CompoundSelect[Any]:
    run = (work.c.kind == RUN) & (work.c.object == bindparam("of_object"))
    stage = (work.c.kind == STAGE) & (func.substr(work.c.object, 1, bindparam("length")) == bindparam("within"))
    mine = work.c.project == bindparam("of_project")
    # UNION ALL uses an index to find the run, while OR would scan every run of the project
    return union_all(*[select(*_told(_now_of(server))).where(mine, one) for one in (run, stage)])


@functools.cache
def _whole(dialect: str, server: bool) -> Select[Any]:
    """Return the query for a run's rows with the queue rows of the run (`Work.…`) and of its stages (`Trouble.…`).

    Tracebacks are left out, because each would be repeated in the row of every attempt.
    """
    trouble, now = work.alias(), _now_of(server)
    of_stage = (trouble.c.project == bindparam("of_project")) & (trouble.c.kind == STAGE)
    of_stage &= trouble.c.object == stages.c.run_id + "/" + stages.c.name
    columns = [
        column.label(f"{kind}.{column.key}")
        for kind, rows in zip(_QUEUED, (work, trouble), strict=True)
        for column in _told(now, rows)
        if column.key != "traceback"
    ]
    return rows_on(dialect).add_columns(*columns).outerjoin(trouble, of_stage)


@functools.cache
def _listing(server: bool, of_kind: bool, within: bool, dead: bool) -> Select[Any]:
    query = select(*_told(_now_of(server))).where(work.c.project == bindparam("of_project"))
    if of_kind:
        query = query.where(work.c.kind == bindparam("of_kind"))
    if within:
        query = query.where(func.substr(work.c.object, 1, bindparam("length")) == bindparam("within"))
    if dead:
        query = query.where(work.c.dead_at.is_not(None))
    return query.order_by(work.c.kind, work.c.object)


@functools.cache
def _giving(server: bool, hold: bool) -> Update:
    held = keyed(work, id=bindparam("of_id"), lease_token=bindparam("of_token"), project=bindparam("of_project"))
    due = _now_of(server) + bindparam("after", type_=Float(53))
    settled: dict[str, Any] = {"failures": 0, "failed_since": None, "error": "", "traceback": "", "due_at": due}
    given = settled if hold else {**settled, **_FREE}
    return update(work).where(*held, work.c.wanted_version == bindparam("seen")).values(given)


@dataclass(frozen=True, slots=True)
class Cursors:
    """Cursors of one project's sinks, for one delivering process.

    Args:
        owner: `host:pid:start` of this process.
        alive: returns whether another owner may be alive; a dead owner loses its leases immediately.
    """

    ledger: Ledger
    owner: str
    alive: Callable[[str], bool]

    def claim(self, sink: str) -> Cursor | None:
        """Claim a sink for this process's deliveries; None if another process delivers, or the sink is not due.

        Raises:
            InfrastructureError: the answer was lost; if the cursor was claimed, it has this owner.
        """
        now = self.ledger.clock.now()
        with self.ledger.untold() as connection:
            query = select(cursors).where(*self._here(sink)).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is None and not self._made(connection, sink):
                return None
            found = to_record(Cursor, row if row is not None else connection.execute(query).one())
            theirs = found.lease_owner not in (None, self.owner) and (found.lease_until or 0.0) > now
            if (theirs and self.alive(str(found.lease_owner))) or (found.not_before or 0.0) > now:
                return None
            leased: dict[str, Any] = {"lease_owner": self.owner, "lease_until": now + LEASE_SECONDS}
            connection.execute(update(cursors).where(*self._here(sink)).values(leased))
            return replace(found, **leased)

    def _made(self, connection: Connection, sink: str) -> bool:
        """Recreate a lost cursor at the position where the sink was added; False if another process has done so."""
        after = Snapshot(connection, self.ledger.project).sink_added_at(sink)
        values = {"project": self.ledger.project, "sink": sink, "sequence": after, **FRESH, "at": None, **FREE}
        with suppress(exc.IntegrityError), connection.begin_nested():
            connection.execute(insert(cursors).values(**values))
            return True
        return False

    def move(self, held: Cursor, sequence: int, *, delivered: bool, keep: bool) -> Cursor:
        """Advance the cursor: the sink has every event up to `sequence`.

        Args:
            delivered: whether the sink received an event; False: no event was for this sink.
            keep: whether to keep the lease.

        Raises:
            StaleWriteError: another process has the cursor, and delivers from the old position.
        """
        now = self.ledger.clock.now()
        values: dict[str, Any] = {"sequence": sequence, **(FRESH | {"at": now} if delivered else {})}
        values |= {"lease_until": now + LEASE_SECONDS} if keep else FREE
        return self._set(held, values)

    def failed(self, held: Cursor, error: str, wait: float) -> Cursor:
        """Record a failed delivery; the next delivery is due after `wait` seconds. Errors: see `move`."""
        now = self.ledger.clock.now()
        since = now if held.failed_since is None else held.failed_since
        values = {"failures": held.failures + 1, "error": plain(error), "failed_since": since, "not_before": now + wait}
        return self._set(held, values | FREE)

    def release(self, held: Cursor) -> None:
        """Release the lease, so that another process can deliver. Errors: see `move`."""
        self._set(held, FREE)

    def _set(self, held: Cursor, values: dict[str, Any]) -> Cursor:
        mine = (*self._here(held.sink), cursors.c.lease_owner == self.owner, cursors.c.sequence == held.sequence)
        with self.ledger.untold() as connection:
            if not connection.execute(update(cursors).where(*mine).values(values)).rowcount:
                raise StaleWriteError(f"sink {held.sink}: another process delivers its events now")
        return replace(held, **values)

    def _here(self, sink: str) -> tuple[Any, ...]:
        return cursors.c.project == self.ledger.project, cursors.c.sink == sink
