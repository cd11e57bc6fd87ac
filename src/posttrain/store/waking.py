"""Waking: whoever gives an object something to do says so in the same transaction."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, func, or_, text, update

from posttrain.store.schema import watches, work
from posttrain.store.scope import Scope

RUN, STAGE, SWEEP = "run", "stage", "sweep"  # kinds of work
_INTO = "INSERT INTO work (project, kind, object, due_at, priority, wanted_version, failures, error, traceback) "
_THERE = (
    " ON CONFLICT (project, kind, object) DO UPDATE SET wanted_version = work.wanted_version + 1, "
    "due_at = CASE WHEN work.due_at < excluded.due_at THEN work.due_at ELSE excluded.due_at END"
)
_WAKE = text(f"{_INTO}VALUES (:project, :what, :object, :due, 0, 1, 0, '', ''){_THERE}")


def waking(project: str, run: str) -> str:
    """SQL that wakes a run as a part of a larger statement; it wakes none where the run is NULL.

    Args:
        project, run: SQL expressions.
    """
    return f"{_INTO}SELECT {project}, '{RUN}', {run}, 0.0, 0, 1, 0, '', '' WHERE {run} IS NOT NULL{_THERE}"


def wake(connection: Connection, project: str, kind: str, names: Collection[str], due: float = 0.0) -> None:
    """Let objects be looked at, from `due` (seconds since the epoch) on, in the transaction of `connection`."""
    if names:
        woken = [{"project": project, "what": kind, "object": name, "due": due} for name in sorted(names)]
        connection.execute(_WAKE, woken)


def settle_at(connection: Connection, project: str, run_id: str, host: str | None) -> None:
    """Let one host's drivers alone look at a run, whose job it has; None: those of any."""
    mine = (work.c.project == project) & (work.c.kind == RUN) & (work.c.object == run_id)
    connection.execute(update(work).where(mine).values(affinity=host))


def settle(connection: Connection, project: str, names: Collection[str]) -> None:
    """Nobody has to look at these runs any more, which end in the transaction of `connection`, nor at their stages."""
    for name in sorted(names):
        below = func.substr(work.c.object, 1, len(name) + 1) == f"{name}/"
        connection.execute(delete(work).where(work.c.project == project, or_(work.c.object == name, below)))
        connection.execute(Scope(project).delete(watches).where(watches.c.run_id == name))


def revive(connection: Connection, project: str, run_id: str) -> None:
    """Let a run and its stages be looked at though they were set aside, or wait for another try."""
    below = func.substr(work.c.object, 1, len(run_id) + 1) == f"{run_id}/"
    mine = (work.c.project == project) & or_(work.c.object == run_id, below)
    values = {"dead_at": None, "due_at": 0.0, "failures": 0, "failed_since": None}
    connection.execute(update(work).where(mine).values(values))
