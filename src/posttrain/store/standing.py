"""How a ledger stands as a whole, in numbers, for whoever watches a server. Of all projects, and without their names.

Three statements, whose price does not grow with what happened so far: what may be many is counted up to `MOST`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Float, case, cast, func, literal, select
from sqlalchemy.sql.elements import ColumnElement

from posttrain.domain.lifecycle import RUN
from posttrain.domain.ports import Clock
from posttrain.store.database import Database
from posttrain.store.schema import cursors, events, runs, sinks, tree_head, unsealed, work

MOST = 100_000  # that are counted of anything
_AT_ONCE = 1000  # named
DELIVERING, FAILING, PAUSED = "delivering", "failing", "paused"


@dataclass(frozen=True, slots=True)
class SinksStanding:
    """Sinks of one kind."""

    states: Mapping[str, int]
    behind: int  # events that the one which is furthest behind has not seen
    failures: int  # most failures in a row of one that is not paused


@dataclass(frozen=True, slots=True)
class Standing:
    """How a ledger stands."""

    runs: Mapping[str, int]  # by state
    due: int  # objects that wait for a driver
    oldest_due: float  # seconds that the first of those has waited which were due at a time
    at_once: frozenset[int]  # those that were due at once: nothing says since when, but whoever saw them before
    leased: int
    expired: int  # leases that nobody renewed and nobody took
    dead: int  # set aside until a person looks
    sealed: int  # events
    unsealed: int
    oldest_unsealed: float  # seconds
    sinks: Mapping[str, SinksStanding] = field(default_factory=dict)  # by kind


def standing(database: Database, clock: Clock) -> Standing:
    """How it stands now.

    Raises:
        WorkspaceError: it cannot be reached. DeadlineError: it answers too late.
    """
    here = clock.now()
    with database.read(across="numbers of the whole server") as connection:
        of_server = connection.dialect.name == "postgresql"  # whose own clock the queue's times are of
        now: ColumnElement[float] = _SERVERS if of_server else literal(here, Float(53))
        row = connection.execute(select(*_runs(), *_queue(now), *_log())).one()._mapping
        waiting = select(work.c.id).where(*_due(now), work.c.due_at == 0.0).order_by(work.c.id).limit(_AT_ONCE)
        at_once = frozenset(connection.execute(waiting).scalars())
        kinds: dict[str, SinksStanding] = {}
        for kind, state, number, behind, failures in connection.execute(_SINKS):
            known = kinds.get(kind, SinksStanding({}, 0, 0))
            kinds[kind] = SinksStanding(
                {**known.states, state: number}, max(known.behind, behind or 0), max(known.failures, failures or 0)
            )
    return Standing(
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


def _runs() -> list[ColumnElement[int]]:
    found: list[ColumnElement[int]] = []
    for state in RUN:
        some = select(literal(1)).select_from(runs).where(runs.c.state == state).limit(MOST).subquery()
        found.append(select(func.count()).select_from(some).scalar_subquery().label(f"runs_{state}"))
    return found


def _queue(now: ColumnElement[float]) -> list[ColumnElement[float]]:
    """Rows of the queue are of what has not ended."""
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
    some = select(unsealed.c.event).limit(MOST).subquery()
    first = select(events.c.at).join(unsealed, unsealed.c.event == events.c.id).order_by(unsealed.c.event).limit(1)
    return [
        select(tree_head.c.size).scalar_subquery().label("sealed"),
        select(func.count()).select_from(some).scalar_subquery().label("unsealed"),
        first.scalar_subquery().label("unsealed_since"),
    ]


_SERVERS: ColumnElement[float] = cast(func.extract("epoch", func.clock_timestamp()), Float(53))
_HEAD = select(tree_head.c.size).scalar_subquery()
_STATE = case((sinks.c.paused != "", PAUSED), (cursors.c.failures > 0, FAILING), else_=DELIVERING)
_FAILS = case((sinks.c.paused == "", cursors.c.failures), else_=0)
_SINKS = (
    select(sinks.c.kind, _STATE.label("state"), func.count(), func.max(_HEAD - cursors.c.sequence), func.max(_FAILS))
    .outerjoin(cursors, (cursors.c.project == sinks.c.project) & (cursors.c.sink == sinks.c.name))
    .group_by(sinks.c.kind, _STATE)
)
