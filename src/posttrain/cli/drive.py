"""Commands that drive or stop a run (`run`, `attach`, `retry`, `stop`), and `plan` and `lock`.

`run`, `attach` and `retry` drive a run until the run ends or the user leaves it, and `stop` until the run has stopped.
`plan` and `lock` inspect a run before any process starts.

A command that drives a run can end before the run does:

| cause | effect |
|---|---|
| `--detach` | a background driver takes the run; the command ends with 0 |
| Ctrl-C on a terminal | the same, unless another process drives the run; the command ends with 130 |
| SIGINT without a terminal, SIGTERM, SIGHUP | no driver is started: running jobs continue, later stages wait |
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    ago,
    answer_json,
    aside,
    console,
    digest,
    duration,
    emit_json,
    lazily,
    open_control,
    say,
    show,
)
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.lifecycle import RunState, is_final
from posttrain.domain.overrides import single

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import RunStatus, Submitted, TrackerState
    from posttrain.domain.records import RunRecord

DETACHED = 130


FileArgument = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")]


SeedOption = Annotated[int | None, typer.Option(help="Override the seed of the run file.")]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override a field of the run file, e.g. grpo.steps=100; repeatable.",
        autocompletion=lazily("fields"),
    ),
]


def changes(seed: int | None, sets: Sequence[str] | None) -> str:
    """Return the options that change a run file, as typed."""
    words = [f"--seed {seed}"] if seed is not None else []
    return "".join(f" {word}" for word in (*words, *(f"--set {shlex.quote(one)}" for one in sets or ())))


def plan(
    file: FileArgument,
    seed: SeedOption = None,
    sets: SetOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the sizes that Posttrain chooses, and each suite's evaluator.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Validate a run file; show its stages, cache, cost and power. The command writes nothing."""
    view = open_control().plan(file, seed=seed, setting=single(sets or ()))
    answer_json(output, view.to_json)
    from posttrain.cli.screens import plan_lines, plan_tree

    show(plan_tree(view, verbose=verbose), *plan_lines(view, verbose=verbose))
    if not view.existing:
        say(f"next:     {_first(view.changes, f'posttrain run {file}{changes(seed, sets)}')}")


def lock(
    file: FileArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="Manifest file, ending in .lock.json; default: RUN.lock.json next to the run file."),
    ] = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write the immutable manifest of a run file. The SHA-256 of the manifest is the run's identity."""
    planned = open_control().lock(file, seed=seed, setting=single(sets or ()))
    manifest = planned.manifest
    path = out or planned.place
    planned.write(path)
    answer_json(output, lambda: {"digest": manifest.digest, "path": str(path)})
    say(f"{manifest.digest}  {path}", *(f"warning: {warning}" for warning in planned.warnings))
    again = [f"{change} and lock again" for change in planned.changes[-1:]]
    say(f"next: {_first((*planned.changes[:-1], *again), f'posttrain run {path}')}")


def _first(changes: Sequence[str], command: str) -> str:
    """Return the next action: the changes to make, then the command."""
    return f"{'; '.join(changes)}; then {command}" if changes else command


RunArgument = Annotated[
    str,
    typer.Argument(
        help="Run id, a prefix of it, or a run name (its newest run).",
        autocompletion=lazily("runs"),
        show_default=False,
    ),
]


_STOP_SECONDS = 90.0


_LOOK = 0.2  # seconds between two reads of the trackers' states


_TRACKERS_SECONDS = 10.0  # the longest wait for trackers at the end of `run`; they continue after it


class Signals:
    """Signal handlers while a run is driven: they handle the first Ctrl-C and the first SIGTERM or SIGHUP."""

    def __init__(self) -> None:
        self.ending: int | None = None  # SIGTERM or SIGHUP

    def interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handle Ctrl-C, and ignore another Ctrl-C while the command detaches."""
        signal.signal(number, _unheard)
        raise KeyboardInterrupt

    def end(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handle a SIGTERM or SIGHUP; the next such signal ends the process immediately."""
        self.ending = number
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt


def _unheard(number: int, frame: FrameType | None) -> None:
    """Ignore a signal; used instead of SIG_IGN, which child processes would inherit."""


@contextmanager
def heard() -> Iterator[Signals]:
    """Handle the signals that end the wait for a run, except signals that the parent process ignores."""
    signals = Signals()
    handlers = {signal.SIGINT: signals.interrupt, signal.SIGTERM: signals.end, signal.SIGHUP: signals.end}
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.getsignal(number) for number in handlers}
    usual = (signal.SIG_DFL, signal.default_int_handler)
    changed = [number for number in handlers if before[number] in usual]
    for number in changed:
        signal.signal(number, handlers[number])
    try:
        yield signals
    finally:
        for number in changed:
            signal.signal(number, before[number])


def end_by(number: int, control: Control, run_id: str) -> NoReturn:
    """End this process with the signal, as the sender expects; before that, report how the run continues."""
    with suppress(OSError, PosttrainError):  # the terminal no longer exists
        driver = control.driver(run_id)
        if driver is not None and driver.nobody:
            aside(
                f"ended by {signal.Signals(number).name}; running jobs continue, and later stages wait for a driver: "
                f"posttrain attach {run_id}"
            )
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)  # reached if the parent process blocked the signal


def leave(control: Control, run_id: str, reattach: str) -> None:
    """Handle Ctrl-C: on a terminal, a background driver takes the run over unless another process drives it."""
    driver = control.driver(run_id)
    if driver is None:
        say(f"run {run_id} has ended: posttrain get {run_id}")
        return
    words = "detached; running jobs continue, and later stages wait for a driver. Commands for this run:"
    again = "re-attaches and drives the run"
    if driver.nobody and _on_a_terminal():
        say("detaching: a background driver takes the run over …")
        try:
            driver = control.detach(run_id)
        except PosttrainError as error:
            aside(f"error: {error}")
    if not driver.nobody:
        words = f"detached; the run continues, driven {driver.words}. Commands for this run:"
        again = "re-attaches"
    say(
        words,
        f"  {reattach}    {again}",
        f"  posttrain get {run_id} --watch    only watches",
        f"  posttrain stop {run_id}    stops it",
    )


def _on_a_terminal() -> bool:
    """Return whether a person types here and reads the output."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _positive(timeout: float | None) -> float | None:
    if timeout is not None and not 0 < timeout < float("inf"):  # this form of the condition also rejects NaN
        raise InputError(f"--timeout must be more than 0 seconds, got {timeout:g}; leave it out to wait without limit")
    return timeout


TimeoutOption = Annotated[
    float | None,
    typer.Option(
        callback=_positive,
        help="Maximum seconds to wait; after this time, the command exits with 12 and the run continues.",
    ),
]


TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Tag to add to the run (1-24 characters of a-z 0-9 . _ -); repeatable."),
]


DetachOption = Annotated[
    bool, typer.Option("--detach", help="Return immediately; a background driver continues the run.")
]


def run(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file, or manifest written by lock.")],
    again: Annotated[
        bool, typer.Option("--again", help="Run again although an identical run exists; finished stages are reused.")
    ] = False,
    timeout: TimeoutOption = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="Note to record on the run.")] = "",
    tag: TagOption = None,
    detach: DetachOption = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Submit a run and follow it until it ends.

    If the run's manifest was submitted before, the command attaches to the existing run. The exit code is the run's
    outcome.
    """
    _refuse_both("run", detach, timeout)
    control = open_control()
    setting, tags = single(sets or ()), tuple(tag or ())
    submitted = control.submit(file, again=again, seed=seed, setting=setting, note=note, tags=tags)
    if detach and give_away(control, submitted.run, output, submitted.warnings):
        return
    greet(submitted, again=" (--again starts another)", output=output)
    drive(control, submitted.run.id, timeout, f"posttrain run {file}{changes(seed, sets)}", output)


def attach(
    run: RunArgument,
    timeout: TimeoutOption = None,
    detach: DetachOption = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Return to a run, and drive or watch it to its end.

    If another process drives the run, the command only watches. The exit code is the run's outcome, as for `run`.
    """
    from posttrain.api.values import Submitted

    _refuse_both("attach", detach, timeout)
    control = open_control()
    found = Submitted(control.run(run))
    if detach and give_away(control, found.run, output):
        return
    greet(found, output=output)
    drive(control, found.run.id, timeout, f"posttrain attach {found.run.id}", output)


def retry(
    run: RunArgument,
    timeout: TimeoutOption = None,
    detach: DetachOption = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Resume a stopped or failed run from its checkpoints. The command drives the run to its end."""
    _refuse_both("retry", detach, timeout)
    control = open_control()
    record = control.run(run)
    if record.state not in (RunState.PENDING, RunState.RUNNING, RunState.STOPPING):
        record = control.retry(record.id)
    if detach and give_away(control, record, output):
        return
    (say if output is Output.TEXT else aside)(f"run {record.id} continues")
    drive(control, record.id, timeout, f"posttrain retry {record.id}", output)


def stop(run: RunArgument) -> None:
    """Stop a run: its jobs write a checkpoint and end. `retry` resumes it."""
    control = open_control()
    run_id = control.run(run).id
    control.stop(run_id)
    say(f"run {run_id}: stop requested; its jobs write a checkpoint and end")
    record = control.drive(run_id, timeout=_STOP_SECONDS)
    say(f"run {run_id}: {record.state}; next: {record.next_action or f'posttrain get {run_id}'}")


def drive(control: Control, run_id: str, timeout: float | None, reattach: str, output: Output) -> None:
    """Drive a run, show its progress, write its report and print its summary; if it did not succeed, raise its outcome.

    Args:
        output: with JSON, the command shows no progress and prints the output of `get -o json` at the end of the run.

    Raises:
        PosttrainError: the run's outcome, or the deadline.
        typer.Exit: the command detached after Ctrl-C.
    """
    from posttrain.cli.screens import run_footer

    with heard() as signals:
        try:
            with open_quietly(control, run_id, output) as display:
                control.drive(run_id, timeout=timeout, watch=display, report=True)
        except BaseException as ended:
            if signals.ending is not None:
                end_by(signals.ending, control, run_id)
            if not isinstance(ended, KeyboardInterrupt):
                raise
            leave(control, run_id, reattach)
            raise typer.Exit(DETACHED) from None
    status = control.status(run_id)
    emit_json(run_json(control, status)) if output is Output.JSON else _summary(control, status)
    if status.outcome:  # the error's line contains the reason and the next action
        raise status.outcome
    if output is Output.TEXT:
        console().print(*run_footer(status), sep="\n")


def run_json(control: Control, status: RunStatus) -> dict[str, Any]:
    """Return a run as JSON for programs."""
    trackers = [one.to_json() for one in control.trackers(status.run.id)]
    return status.to_json() | {"scores": control.scores(status.run.id).to_json(), "trackers": trackers}


def give_away(control: Control, run: RunRecord, output: Output, warnings: Sequence[str] = ()) -> bool:
    """Give a run to a background driver and print a line or JSON about it; return False if the run has ended."""
    if is_final("run", run.state):
        return False
    driver = control.detach(run.id)
    aside(*(f"warning: {warning}" for warning in warnings))
    line = f"run {run.id} detached, driven {driver.words}; posttrain attach {run.id} returns to it"
    if driver.nobody:
        line = f"run {run.id} has already ended; posttrain get {run.id} shows the run"
    if output is Output.JSON:
        emit_json(run_json(control, control.status(run.id)))
    else:
        say(line)
    return True


def _refuse_both(verb: str, detach: bool, timeout: float | None) -> None:
    if detach and timeout is not None:
        raise InputError(f"{verb}: --timeout limits the wait, but --detach does not wait; leave one of them out")


@contextmanager
def open_quietly(control: Control, run_id: str, output: Output) -> Iterator[Callable[[RunRecord], None]]:
    """Open the display of a driven run; with JSON output, the display shows nothing."""
    from posttrain.cli.live import open_display

    if output is Output.JSON:
        yield lambda _: None
        return
    with open_display(control, run_id) as display:
        yield display


def greet(found: Submitted, again: str = "", output: Output = Output.TEXT) -> None:
    """Print the run's id and whether the run is new.

    Args:
        again: a text on how to start another run of the same manifest.
    """
    record, tell = found.run, say if output is Output.TEXT else aside
    if not found.attached:
        tell(f"run {record.id}  manifest {digest(record.manifest_digest)}")
    elif is_final("run", record.state):
        tell(f"attached to run {record.id}: {record.state} {ago(record.finished_at)}{again}")
    else:
        tell(f"attached to run {record.id}: {record.state}, submitted {ago(record.created_at)}")
    tell(*(f"warning: {warning}" for warning in found.warnings))


def _summary(control: Control, status: RunStatus) -> None:
    from posttrain.cli.screens import (
        regression_lines,
        score_lines,
        stage_table,
        tracker_lines,
        verdict_lines,
        warning_lines,
    )

    screen, run_id = console(), status.run.id
    found = control.why(run_id)
    screen.print(*regression_lines(found.scores), stage_table(status), sep="\n")
    show(*verdict_lines(found.report.verdicts if found.report else ()), *score_lines(found.scores))
    screen.print(*warning_lines(status), sep="\n", end="\n" if status.warnings else "")
    say(f"run {run_id}: {status.run.state} after {duration(status.seconds)}")
    try:
        written = control.write_report(run_id)
    except PosttrainError as error:  # the run's outcome does not depend on the report
        say(f"warning: no report: {error}")
    else:
        say(f"report: {written.report}", *([f"curves: {written.curves}"] if written.curves else []))
    trackers = _settled(control, run_id)
    show(*tracker_lines(trackers))
    if any(one.under_way for one in trackers):
        say(f"posttrain track {run_id} waits until its trackers are written")


def _settled(control: Control, run_id: str) -> list[TrackerState]:
    """Return the states of a run's trackers when no process writes to them any more, or after `_TRACKERS_SECONDS`."""
    until = time.monotonic() + _TRACKERS_SECONDS
    while True:
        found = control.trackers(run_id)
        if not any(one.under_way for one in found) or time.monotonic() >= until:
            return found
        time.sleep(_LOOK)
