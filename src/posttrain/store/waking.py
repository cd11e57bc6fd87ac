"""Waking: whoever gives an object something to do says so in the same transaction."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, func, or_, text, update

from posttrain.store.schema import work

RUN, STAGE, SWEEP = "run", "stage", "sweep"  # kinds of work
_WAKE = text(
    "INSERT INTO work (project, kind, object, due_at, priority, wanted_version, failures, error, traceback) "
    "VALUES (:project, :kind, :object, :due, 0, 1, 0, '', '') ON CONFLICT (project, kind, object) DO UPDATE SET "
    "wanted_version = work.wanted_version + 1, "
    "due_at = CASE WHEN work.due_at < excluded.due_at THEN work.due_at ELSE excluded.due_at END"
)


def wake(connection: Connection, project: str, kind: str, names: Collection[str], due: float = 0.0) -> None:
    """Let objects be looked at, from `due` (seconds since the epoch) on, in the transaction of `connection`."""
    if names:
        rows = [{"project": project, "kind": kind, "object": name, "due": due} for name in sorted(names)]
        connection.execute(_WAKE, rows)


def revive(connection: Connection, project: str, run_id: str) -> None:
    """Let a run and its stages be looked at though they were set aside, or wait for another try."""
    below = func.substr(work.c.object, 1, len(run_id) + 1) == f"{run_id}/"
    mine = (work.c.project == project) & or_(work.c.object == run_id, below)
    values = {"dead_at": None, "due_at": 0.0, "failures": 0, "failed_since": None}
    connection.execute(update(work).where(mine).values(values))
