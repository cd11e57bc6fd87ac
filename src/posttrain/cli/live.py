"""The display of a driven run: a table that is redrawn in place on a terminal, plain lines elsewhere.

The display reads only the ledger and new event segments, at most eight times a second, in the thread that drives the
run. Lines are read less often while nothing changes, because each reading takes time from the jobs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.cli.console import as_typed, console, count, duration, glyph, number, say, style
from posttrain.domain.jobs import Note
from posttrain.domain.lifecycle import Reason, StageState, is_final
from posttrain.domain.records import RunRecord

if TYPE_CHECKING:
    from posttrain.api.control import Control, Watcher
    from posttrain.api.values import RunStatus, StageStatus

_REDRAW = 1 / 8  # seconds between two drawings
_LINE_EVERY = 2.0  # seconds between plain lines about the same stage
_QUIET, _SELDOM = 1.0, 0.4  # after this many seconds without a change, seconds between two readings for lines
_BAR = 18  # columns of the progress bar
_BESIDE, _NUMBER = 58, 9  # columns taken by the rest of a row, and by each metric
_ASKS = (Reason.WAITING_FOR_SIGNAL, Reason.WAITING_FOR_APPROVAL)  # the stage needs a person
# column title → metric of the job; on a narrow terminal, the last columns are omitted
_METRICS = {"reward": "reward/mean", "probe": "probe/accuracy", "length": "response_tokens/mean", "loss": "loss"}
_WIDE, _MEDIUM = 118, 96  # widths of a terminal, in columns


@contextmanager
def open_display(control: Control, run_id: str) -> Iterator[Callable[[RunRecord], None]]:
    """Yield a function that shows the run each time it is called: a table on a terminal, lines elsewhere."""
    watcher = control.watcher(run_id)
    if sys.stdout.isatty():
        table = TableDisplay(watcher)
        with table.live:
            yield table
    else:
        yield LineDisplay(watcher)


class TableDisplay:
    """A table with one row per stage. It is redrawn in place while the context `live` is open, and then removed."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.live = Live(console=console(), auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __call__(self, run: RunRecord) -> None:
        """Redraw, unless the last drawing is too recent."""
        if time.monotonic() - self._drawn < _REDRAW:
            return
        self.live.update(run_table(self._watcher.read(), self.live.console.width), refresh=True)
        self._drawn = time.monotonic()


class LineDisplay:
    """One line for each change of state, and a progress line for each running stage every two seconds."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._told: dict[str, tuple[str, str, str]] = {}  # stage → state, reason and message last printed
        self._line_at: dict[str, float] = {}
        self._said_at: dict[str, float | None] = {}  # stage → time of the progress last printed
        self._noted: dict[str, tuple[Note, ...]] = {}
        self._looked = self._changed = 0.0  # when the status was last read, and when a stage last changed

    def __call__(self, run: RunRecord) -> None:
        """Print a line for each change."""
        now = time.monotonic()
        pause = _REDRAW if now - self._changed < _QUIET else _SELDOM
        if now - self._looked < pause and not is_final("run", run.state):
            return
        status = self._watcher.read()
        self._looked = time.monotonic()
        for stage in status.stages:
            self._stage(stage, now)

    def _stage(self, stage: StageStatus, now: float) -> None:
        row = stage.record
        for note in stage.progress.notes:
            if note not in self._noted.get(row.name, ()):
                self._changed = now
                _line(row.name, f"note: {note.message}", note.at)
        self._noted[row.name] = stage.progress.notes
        told, progress = (row.state, row.reason, row.message), stage.progress
        if row.state == StageState.PENDING:
            return
        if told != self._told.get(row.name):
            self._told[row.name] = told
            self._line_at[row.name] = self._changed = now
            _line(row.name, _changed(stage), stage.changed_at)
            return
        new = progress.total and not progress.stale and progress.at != self._said_at.get(row.name)
        if row.state == StageState.RUNNING and new and now - self._line_at[row.name] >= _LINE_EVERY:
            self._line_at[row.name], self._said_at[row.name] = now, progress.at
            _line(row.name, progress_words(stage), progress.at)


def progress_words(stage: StageStatus) -> str:
    """Return a stage's progress as `120/240 reward 0.91 probe 0.95 41k tok/s eta 6s`."""
    progress = stage.progress
    words = [f"{progress.step}/{progress.total}"]
    words += [f"{title} {number(progress.latest[m])}" for title, m in _METRICS.items() if m in progress.latest]
    if progress.latest.get("updates") == 0:
        words.append(f"no update in step {progress.step}")
    if progress.tokens_per_second is not None:
        words.append(f"{count(progress.tokens_per_second)} tok/s")
    if progress.eta is not None and stage.record.state == StageState.RUNNING:
        words.append(f"eta {duration(progress.eta)}")
    return " ".join(words)


def run_table(status: RunStatus, width: int) -> RenderableType:
    """Return a table of the run's stages; below it, pending requests to a person in full, and recent notes."""
    titles = list(_METRICS)[: 4 if width >= _WIDE else 3 if width >= _MEDIUM else 2]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for title in ("", "stage", "progress", "step", *titles, "tok/s", "eta", "time"):
        left = title in ("", "stage", "progress")
        most = max(_BAR, width - _BESIDE - _NUMBER * len(titles)) if title == "progress" else None
        table.add_column(title, justify="left" if left else "right", no_wrap=True, max_width=most)
    for stage in status.stages:
        table.add_row(*_row(stage, titles))
    head = Text.assemble(
        (f"{glyph(status.run.state)} {status.run.id}", f"bold {style(status.run.state)}"),
        f"  {status.run.state}  {duration(status.seconds)}  {count(status.tokens)} tokens",
        ("" if is_final("run", status.run.state) else "  Ctrl-C leaves it running", "dim"),
    )
    asked = [
        Text(
            as_typed(f"  {stage.record.name}: {stage.reason}; next: {stage.next_action}"),
            style=style("warn"),
            overflow="fold",
        )
        for stage in status.stages
        if stage.record.state == StageState.READY and stage.record.reason in _ASKS
    ]
    notes = [(stage.record.name, note.message) for stage in status.stages for note in stage.progress.notes][-3:]
    said = [Text(f"  {name}: {note}", style="dim", overflow="ellipsis") for name, note in notes]
    return Group(head, table, *asked, *said)


def _row(stage: StageStatus, titles: list[str]) -> list[RenderableType]:
    row, progress = stage.record, stage.progress
    mark = Text(glyph(row.state), style=style(row.state))
    if row.state != StageState.RUNNING or not progress.total or progress.stale:
        words = f"reused from {row.cached_from}" if row.cached_from else stage.reason
        shown: RenderableType = Text(
            words if row.state != StageState.RUNNING else "starting", style="dim", overflow="ellipsis"
        )
        if row.state == StageState.SUCCEEDED and progress.total:
            shown = ProgressBar(total=1, completed=1, width=_BAR)
    else:
        shown = ProgressBar(total=progress.total, completed=progress.step, width=_BAR)
    latest = progress.latest
    return [
        mark,
        Text(row.name, style="bold" if row.state == StageState.RUNNING else "default"),
        shown,
        f"{progress.step}/{progress.total}" if progress.total else "",
        *(number(latest[_METRICS[t]]) if _METRICS[t] in latest else "" for t in titles),
        count(progress.tokens_per_second) if progress.tokens_per_second else "",
        duration(progress.eta) if progress.eta is not None and row.state == StageState.RUNNING else "",
        duration(stage.seconds) if stage.attempts else "",
    ]


def _changed(stage: StageStatus) -> str:
    row = stage.record
    words = [stage.standing]
    if row.cached_from:
        words.append(f"reused from {row.cached_from}")
    elif stage.reason not in ("done", row.state):
        words.append(stage.reason)
    if row.state == StageState.SUCCEEDED and stage.attempts:
        words += [duration(stage.seconds), progress_words(stage) if stage.progress.total else ""]
    asks = row.state not in (StageState.SUCCEEDED, StageState.RUNNING, StageState.READY) or row.reason in _ASKS
    if asks and stage.next_action:
        words.append(as_typed(f"next: {stage.next_action}"))
    return "; ".join(word for word in words if word)


def _line(stage: str, words: str, at: float | None = None) -> None:
    """Print one line that begins with the time of its event, and with the date if the event was not today."""
    now = time.time()
    day, today = (time.strftime("%Y-%m-%d", time.localtime(moment)) for moment in (now if at is None else at, now))
    stamp = time.strftime("%H:%M:%S", time.localtime(now if at is None else at))
    say(f"{stamp if day == today else f'{day} {stamp}'} {stage} {words}")
    sys.stdout.flush()
