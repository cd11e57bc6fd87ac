"""A job that has ended while no process drives its run, in words."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from signal import Signals

from posttrain.domain.errors import PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import AttemptRecord
from posttrain.store.atomic import read_json
from posttrain.workspace.opened import OpenWorkspace


def ended_unseen(workspace: OpenWorkspace, attempts: Sequence[AttemptRecord]) -> tuple[str, str] | None:
    """Why a stage is where it is whose job has ended with nobody to take that in, and what a person would do next.

    It is told of jobs on this machine, whose supervisor writes down how they end.

    Args:
        attempts: of the stage, oldest first.

    Returns:
        None: no such end is known.
    """
    last = attempts[-1] if attempts else None
    if last is None or is_final("attempt", last.state) or workspace.jobs.elsewhere(last):
        return None
    record = None
    with suppress(PosttrainError, OSError):  # whoever drives the run on says what is wrong with it
        record = read_json(workspace.jobs.folders.of(last).path / "exit.json")
    code = record.get("exit_code") if isinstance(record, dict) else None
    if not isinstance(code, int):
        return None
    how = f"was ended by {Signals(-code).name}" if -code in set(Signals) else f"ended with {code}"
    return (
        f"the job of attempt {last.number} {how}, and no process drives the run to take that in",
        f"posttrain attach {last.run_id} does, and drives it on",
    )
