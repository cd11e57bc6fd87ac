"""How a run is doing, read from the attempt folders: what the live display, `get` and the report show."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.domain.facts import Metric, Note, Progress, Span
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import AttemptFolder
from posttrain.telemetry.timeline import is_call

_HAND_OFFS = 20_000  # that are kept: of some two thousand steps
_RATE_WINDOW = 20  # progress facts that tokens/s and the ETA are averaged over


@dataclass(frozen=True, slots=True)
class StageProgress:
    """One stage as far as its facts tell."""

    step: int = 0
    total: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    eta: float | None = None  # seconds
    latest: dict[str, float] = field(default_factory=dict)  # metric → newest value
    notes: tuple[Note, ...] = ()
    at: float | None = None  # when the job said how far it is
    stale: bool = False  # an earlier attempt said so, and the newest one nothing yet


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve."""

    step: int
    value: float


class StageWatcher:
    """Reads the facts of one stage's attempts as they come; each segment is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, int] = {}
        self._last: Progress | None = None
        self._recent: deque[Progress] = deque(maxlen=_RATE_WINDOW)  # of the newest attempt
        self._by = ""  # folder of the attempt that said them
        self._latest: dict[str, float] = {}
        self._of_step: frozenset[str] = frozenset()  # metrics of the newest step that updated the weights
        self._notes: deque[Note] = deque(maxlen=5)
        self.hand_offs: deque[Span] = deque(maxlen=_HAND_OFFS)  # of the newest attempt, the latest ones
        self._spans_by = ""
        self.curves: dict[str, dict[int, float]] = {}  # metric → step → value; a redone step overwrites

    def read(self, attempts: Sequence[AttemptRecord]) -> StageProgress:
        """Take in what is new and sum up. A segment that cannot be read becomes a note: watching harms no run."""
        for attempt in attempts:
            folder = AttemptFolder(self._root / attempt.folder, attempt.channel)
            for facts, number in folder.segments(self._seen.get(attempt.folder, 0), self._unreadable):
                for fact in facts:
                    self._take(fact, attempt.folder)
                self._seen[attempt.folder] = number
        last = self._last
        if last is None:
            return StageProgress(latest=dict(self._latest), notes=tuple(self._notes))
        rate, eta = self._pace() if self._by == attempts[-1].folder else (None, None)
        return StageProgress(
            last.step,
            last.total,
            last.tokens,
            rate,
            eta,
            dict(self._latest),
            tuple(self._notes),
            last.at,
            stale=self._by != attempts[-1].folder,
        )

    def _pace(self) -> tuple[float | None, float | None]:
        """Tokens per second, and seconds to the end; None where the newest attempt has not said enough, or is there."""
        first, last = self._recent[0], self._recent[-1]
        seconds = last.at - first.at
        if seconds <= 0:
            return None, None
        pace = (last.step - first.step) / seconds
        left = last.total - last.step
        return (last.tokens - first.tokens) / seconds, left / pace if pace > 0 and left > 0 else None

    def _unreadable(self, error: Exception) -> None:
        self._notes.append(Note(str(error), time.time(), "warning"))

    def curve(self, metric: str) -> list[Point]:
        """A metric by step, without the steps that were lost and redone."""
        return [Point(step, value) for step, value in sorted(self.curves.get(metric, {}).items())]

    def _take(self, fact: object, folder: str) -> None:
        if isinstance(fact, Progress):
            if folder != self._by:
                self._by = folder
                self._recent.clear()  # what was done in another attempt's time says nothing of this one's pace
            self._last = fact
            self._recent.append(fact)
        elif isinstance(fact, Metric):
            self._forget_updates(fact)
            for name, value in fact.values.items():
                self._latest[name] = value
                self.curves.setdefault(name, {})[fact.step] = value
        elif isinstance(fact, Span):
            if folder != self._spans_by:  # a step that was lost and redone is timed once
                self._spans_by = folder
                self.hand_offs.clear()
            if not is_call(fact):
                self.hand_offs.append(fact)
        elif isinstance(fact, Note):
            self._notes.append(fact)

    def _forget_updates(self, fact: Metric) -> None:
        """A step that updated nothing has no loss: that of an earlier one is not the newest value."""
        if fact.values.get("updates"):
            self._of_step = frozenset(fact.values)
        elif "updates" in fact.values:
            for name in self._of_step - fact.values.keys():
                self._latest.pop(name, None)
