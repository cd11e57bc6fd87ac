"""What ends a command that drives a run before the run has ended, and what becomes of the run then.

| what | what is done |
|---|---|
| `--detach` | a background driver takes the run; the command ends with 0 |
| Ctrl-C on a terminal | the same; the command ends with 130. While somebody else drives the run, it only leaves |
| SIGINT without a terminal, SIGTERM, SIGHUP | nothing is started: jobs that run go on, the stages after them wait |
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from posttrain.cli.console import aside, say
from posttrain.domain.errors import PosttrainError

if TYPE_CHECKING:
    from posttrain.api.control import Control

DETACHED = 130


class Signals:
    """What was heard while a run is driven: Ctrl-C once, however often it is pressed; the order to end once as well."""

    def __init__(self) -> None:
        self.ending: int | None = None  # SIGTERM or SIGHUP

    def interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        """Ctrl-C: what it begins is not interrupted by the next one."""
        signal.signal(number, _unheard)
        raise KeyboardInterrupt

    def end(self, number: int, frame: FrameType | None) -> NoReturn:
        """The next one ends the process at once."""
        self.ending = number
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt


def _unheard(number: int, frame: FrameType | None) -> None:
    """A function, not SIG_IGN, which what is started would inherit."""


@contextmanager
def heard() -> Iterator[Signals]:
    """Signals that end the wait for a run; one that whoever started this process has it ignore stays ignored."""
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
    """Die of a signal as whoever sent it expects; first say, where that is possible, what becomes of the run."""
    with suppress(OSError, PosttrainError):  # the terminal is gone
        driver = control.driver(run_id)
        if driver is not None and driver.nobody:
            aside(
                f"ended by {signal.Signals(number).name}; jobs that run go on, the stages after them wait for a "
                f"driver: posttrain attach {run_id}"
            )
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)  # whoever started this process has it blocked


def leave(control: Control, run_id: str, reattach: str) -> None:
    """Ctrl-C: on a terminal a background driver takes over, unless somebody drives the run anyway."""
    driver = control.driver(run_id)
    if driver is None:
        say(f"run {run_id} has ended: posttrain get {run_id}")
        return
    words = "detached; the job goes on, the stages after it wait for a driver. These act on it:"
    again = "re-attaches and drives the run on"
    if driver.nobody and _on_a_terminal():
        say("detaching: a background driver takes the run over …")
        try:
            driver = control.detach(run_id)
        except PosttrainError as error:
            aside(f"error: {error}")
    if not driver.nobody:
        words = f"detached; the run goes on, driven {driver.words}. These act on it:"
        again = "re-attaches"
    say(
        words,
        f"  {reattach}    {again}",
        f"  posttrain get {run_id} --watch    only watches",
        f"  posttrain stop {run_id}    stops it",
    )


def _on_a_terminal() -> bool:
    """Whether a person types here and reads what is said."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
