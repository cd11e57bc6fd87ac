"""What was set aside: objects at which looks failed again and again, until a person looks."""

from __future__ import annotations

from posttrain.api.control import Control
from posttrain.api.values import Dead
from posttrain.api.verbs import answers
from posttrain.app.workspace import Workspace
from posttrain.control import attempts
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.records import AttemptRecord


@answers(Control.dead)
def dead(workspace: Workspace, within: str | None) -> list[Dead]:
    """What was set aside, all of it or of one run, or one stage of it.

    Args:
        within: RUN or RUN/STAGE; the run as a person names it.

    Raises:
        NotFoundError: nothing there was set aside, or there is no such run.
    """
    rows = [
        Dead(one.object, one.kind, one.failures, one.failed_since, one.dead_at or 0.0, one.error, one.traceback)
        for one in workspace.reconciler.queue.rows(dead=True)
    ]
    if within is None:
        return rows
    named = _named(workspace, within)
    found = [one for one in rows if one.object == named or one.object.startswith(f"{named}/")]
    if not found:
        raise NotFoundError(f"nothing of {named} was set aside; posttrain dead shows what was")
    return found


@answers(Control.look_again)
def look_again(workspace: Workspace, within: str) -> list[Dead]:
    """Let what was set aside of a run, or of one stage, be looked at again.

    Raises:
        NotFoundError: as `dead`.
    """
    found = dead(workspace, within)
    for one in found:
        workspace.reconciler.queue.revive(one.kind, one.object)
    return found


@answers(Control.assume_dead)
def assume_dead(workspace: Workspace, stage: str) -> AttemptRecord:
    """Take a person's word that the job of RUN/STAGE is dead; see `control.attempts`.

    Raises:
        InputError: it names no stage, or one whose job is seen.
        NotFoundError: there is no such run or stage.
    """
    run, _, name = _named(workspace, stage).partition("/")
    if not name:
        raise InputError(f"dead: --assume-dead needs RUN/STAGE, got {stage!r}; posttrain why {run} names the stage")
    return attempts.assume_dead(workspace.stores, workspace.jobs, run, name)


def _named(workspace: Workspace, text: str) -> str:
    run, _, stage = text.partition("/")
    found = workspace.ledger.find_run(run).id
    return f"{found}/{stage}" if stage else found
