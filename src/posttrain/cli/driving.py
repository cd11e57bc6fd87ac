"""`run`, `attach`, `retry`, `stop`: whoever calls them drives the run until it ends, or leaves it (`cli.leaving`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import Output, ago, aside, console, digest, duration, say
from posttrain.cli.leaving import DETACHED, end_by, heard, leave
from posttrain.cli.plans import SeedOption, SetOption, changes
from posttrain.cli.shell import lazily
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.overrides import single

if TYPE_CHECKING:
    from posttrain.app.runs import Run
    from posttrain.app.workspace import Workspace
    from posttrain.domain.records import RunRecord
    from posttrain.views.status import RunStatus

RunArgument = Annotated[
    str,
    typer.Argument(
        help="Run id, a prefix of it, or a name (its newest run).", autocompletion=lazily("runs"), show_default=False
    ),
]
_STOP_SECONDS = 90.0
_TRACKERS_SECONDS = 10.0  # that the end of `run` waits for trackers; they go on without it


def _positive(timeout: float | None) -> float | None:
    if timeout is not None and not 0 < timeout < float("inf"):  # so put, it refuses nan too
        raise InputError(f"--timeout must be more than 0 seconds, got {timeout:g}; leave it out to wait without limit")
    return timeout


TimeoutOption = Annotated[
    float | None, typer.Option(callback=_positive, help="Seconds to wait at most; the run is not stopped by that.")
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Let a background driver take the run to its end, and do not wait for it.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, attach, stop, retry):
        app.command(command.__name__)(command)


def run(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run file, or a manifest written by lock.")],
    again: Annotated[
        bool, typer.Option("--again", help="Another run of a manifest that was submitted before.")
    ] = False,
    timeout: TimeoutOption = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    detach: DetachOption = False,
) -> None:
    """Submit a run and drive it to its end. One submitted before is attached to; the exit code is the outcome."""
    from posttrain.app.runs import submit
    from posttrain.app.workspace import open_workspace

    _refuse_both("run", detach, timeout)
    workspace = open_workspace()
    handle = submit(file, again=again, workspace=workspace, seed=seed, setting=single(sets or ()))
    if detach and give_away(workspace, handle):
        return
    greet(handle, again=" (--again starts another)")
    drive(workspace, handle, timeout, f"posttrain run {file}{changes(seed, sets)}")


def attach(run: RunArgument, timeout: TimeoutOption = None, detach: DetachOption = False) -> None:
    """Go back to a run: drive it, or watch whoever does, to its end. The exit code is the outcome, as of `run`."""
    from posttrain.app import runs
    from posttrain.app.workspace import open_workspace

    _refuse_both("attach", detach, timeout)
    workspace = open_workspace()
    handle = runs.run(run, workspace)
    if detach and give_away(workspace, handle):
        return
    greet(handle)
    drive(workspace, handle, timeout, f"posttrain attach {handle.id}")


def retry(run: RunArgument, timeout: TimeoutOption = None, detach: DetachOption = False) -> None:
    """Let a stopped or failed run go on from its checkpoints, and drive it."""
    from posttrain.app import runs
    from posttrain.app.workspace import open_workspace
    from posttrain.domain.lifecycle import RunState

    _refuse_both("retry", detach, timeout)
    workspace = open_workspace()
    handle = runs.run(run, workspace)
    if handle.state not in (RunState.PENDING, RunState.RUNNING, RunState.STOPPING):
        handle.retry()
    if detach and give_away(workspace, handle):
        return
    say(f"run {handle.id} goes on")
    drive(workspace, handle, timeout, f"posttrain retry {handle.id}")


def stop(run: RunArgument) -> None:
    """Stop a run: its jobs write a checkpoint and end. `retry` resumes it."""
    from posttrain.app import runs
    from posttrain.app.workspace import open_workspace

    workspace = open_workspace()
    handle = runs.run(run, workspace)
    handle.stop()
    say(f"run {handle.id}: asked to stop; its jobs checkpoint and end")
    record = handle.wait(_STOP_SECONDS)
    say(f"run {handle.id}: {record.state}; next: {record.next_action or f'posttrain get {handle.id}'}")
    workspace.close()


def drive(workspace: Workspace, handle: Run, timeout: float | None, reattach: str) -> None:
    """Drive a run, show it, write its report, print its summary, and raise its outcome if it is not a success.

    Raises:
        PosttrainError: the run's outcome, or the deadline.
        typer.Exit: Ctrl-C detached.
    """
    from posttrain.app.runs import REPORTING, load_ahead
    from posttrain.cli.live import open_display
    from posttrain.cli.screens import run_footer
    from posttrain.control.explain import outcome_error
    from posttrain.views.status import read_status

    with heard() as signals:
        try:
            load_ahead(REPORTING)
            with open_display(workspace, handle.id) as display:
                record = handle.wait(timeout, watch=display)
        except BaseException as ended:
            if signals.ending is not None:
                end_by(signals.ending, workspace, handle)
            if not isinstance(ended, KeyboardInterrupt):
                raise
            leave(workspace, handle, reattach)
            raise typer.Exit(DETACHED) from None
    status = read_status(workspace, handle.id)
    _summary(workspace, handle, status)
    error = outcome_error(record, tuple(stage.record for stage in status.stages))
    workspace.close()
    if error:  # its line says the reason and the next action
        raise error
    console().print(*run_footer(status), sep="\n")


def give_away(workspace: Workspace, handle: Run) -> bool:
    """Give a run to a background driver and say so in one line on stdout; False: it has ended."""
    from posttrain.domain.lifecycle import is_final

    if is_final("run", handle.state):
        return False
    driver = handle.detach()
    for warning in handle.warnings:
        aside(f"warning: {warning}")
    who = f"driven in the {driver}" if driver.pid else "driven to its end already"
    say(f"run {handle.id} detached, {who}; posttrain attach {handle.id} returns to it")
    workspace.close()
    return True


def _refuse_both(verb: str, detach: bool, timeout: float | None) -> None:
    if detach and timeout is not None:
        raise InputError(f"{verb}: --timeout bounds the wait and --detach does not wait, got both; leave one out")


@contextmanager
def open_quietly(workspace: Workspace, run_id: str, output: Output) -> Iterator[Callable[[RunRecord], None]]:
    """The display of a driven run; none where the output is for programs."""
    from posttrain.cli.live import open_display

    if output is Output.JSON:
        yield lambda _: None
        return
    with open_display(workspace, run_id) as display:
        yield display


def greet(handle: Run, again: str = "") -> None:
    """Say which run this is, and whether it is new; `again`: how to start another one of it."""
    from posttrain.domain.lifecycle import is_final

    record = handle.record
    if not handle.attached:
        say(f"run {handle.id}  manifest {digest(record.manifest_digest)}")
    elif is_final("run", record.state):
        say(f"attached to run {handle.id}: {record.state} {ago(record.finished_at)}{again}")
    else:
        say(f"attached to run {handle.id}: {record.state}, submitted {ago(record.created_at)}")
    say(*(f"warning: {warning}" for warning in handle.warnings))


def _summary(workspace: Workspace, handle: Run, status: RunStatus) -> None:
    from posttrain.cli.screens import score_lines, stage_table, tracker_lines, verdict_lines, warning_lines
    from posttrain.trackers.following import settled
    from posttrain.trackers.tracking import WRITING
    from posttrain.views.reporting import write_report
    from posttrain.views.status import run_scores

    screen = console()
    screen.print(stage_table(status))
    report = handle.why().report
    for line in (*verdict_lines(report.verdicts if report else ()), *score_lines(run_scores(workspace, status))):
        screen.print(line)
    screen.print(*warning_lines(status), sep="\n", end="\n" if status.warnings else "")
    say(f"run {handle.id}: {status.run.state} after {duration(status.seconds)}")
    try:
        written = write_report(workspace, handle.id)
    except PosttrainError as error:  # the outcome stands, whatever becomes of its picture
        say(f"warning: no report: {error}")
    else:
        say(f"report: {written.report}", *([f"curves: {written.curves}"] if written.curves else []))
    trackers = settled(workspace, handle.id, _TRACKERS_SECONDS)
    for line in tracker_lines(trackers):
        screen.print(line)
    if any(one.state == WRITING for one in trackers):
        say(f"posttrain track {handle.id} waits until its trackers are written")
