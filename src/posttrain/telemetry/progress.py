"""How a run is doing, read from the attempt folders: what the live display, `get` and the report show."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.domain.facts import Metric, Note, Progress
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import AttemptFolder

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
    notes: tuple[str, ...] = ()


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
        self._recent: deque[Progress] = deque(maxlen=_RATE_WINDOW)
        self._latest: dict[str, float] = {}
        self._notes: deque[str] = deque(maxlen=5)
        self.curves: dict[str, dict[int, float]] = {}  # metric → step → value; a redone step overwrites

    def read(self, attempts: Sequence[AttemptRecord]) -> StageProgress:
        """Take in what is new and sum up. A segment that cannot be read becomes a note: watching harms no run."""
        for attempt in attempts:
            facts, self._seen[attempt.folder] = AttemptFolder(self._root / attempt.folder).facts(
                self._seen.get(attempt.folder, 0), lambda error: self._notes.append(str(error))
            )
            for fact in facts:
                self._take(fact)
        if not self._recent:
            return StageProgress(latest=dict(self._latest), notes=tuple(self._notes))
        first, last = self._recent[0], self._recent[-1]
        seconds = last.at - first.at
        rate = (last.tokens - first.tokens) / seconds if seconds > 0 else None
        pace = (last.step - first.step) / seconds if seconds > 0 else 0.0
        eta = (last.total - last.step) / pace if pace > 0 else None
        return StageProgress(last.step, last.total, last.tokens, rate, eta, dict(self._latest), tuple(self._notes))

    def curve(self, metric: str) -> list[Point]:
        """A metric by step, without the steps that were lost and redone."""
        return [Point(step, value) for step, value in sorted(self.curves.get(metric, {}).items())]

    def _take(self, fact: object) -> None:
        if isinstance(fact, Progress):
            if self._recent and fact.step < self._recent[-1].step:
                self._recent.clear()  # a resumed attempt: the old pace says nothing
            self._recent.append(fact)
        elif isinstance(fact, Metric):
            for name, value in fact.values.items():
                self._latest[name] = value
                self.curves.setdefault(name, {})[fact.step] = value
        elif isinstance(fact, Note):
            self._notes.append(fact.message)
