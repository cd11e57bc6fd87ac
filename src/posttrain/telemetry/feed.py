"""A stage's points in the order in which they are written to trackers, from the facts of its attempts.

Of a step that was lost and redone the first value counts: it may have been written already. A redone step that came
out otherwise is told.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from posttrain.domain.facts import Metric
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import AttemptFolder
from posttrain.telemetry.tracking import Row

_REMEMBERED = 10_000  # steps of a metric that a redone one is compared with: more than lie between two checkpoints
_OF_THE_MACHINE = ("memory/",)  # another process has other values
_CONTROLS = dict.fromkeys((*range(32), 127, *range(128, 160), 8232, 8233), "_")
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), "_")


class StageFeed:
    """Reads the facts of one stage's attempts as they come; each segment is read once.

    Args:
        root: the workspace folder.
        stage: how rows name the stage.
    """

    def __init__(self, root: Path, stage: str) -> None:
        self._root, self._stage = root, stage
        self._seen: dict[str, int] = {}
        self._last: dict[str, int] = {}  # metric → the last step that was given out
        self._values: dict[str, OrderedDict[int, float]] = {}
        self.differing = 0  # values of redone steps that were not those of the first time
        self.difference = ""  # the first of them, in words
        self.troubles: list[str] = []  # segments that could not be read

    def read(self, attempts: Sequence[AttemptRecord]) -> Iterator[Row]:
        """Rows of what is new, a segment at a time."""
        for attempt in attempts:
            folder = AttemptFolder(self._root / attempt.folder, attempt.channel)
            for facts, number in folder.segments(self._seen.get(attempt.folder, 0), self._unreadable):
                for fact in facts:
                    if isinstance(fact, Metric):
                        yield from self.take(fact.step, fact.at, fact.values)
                self._seen[attempt.folder] = number

    def _unreadable(self, error: Exception) -> None:
        self.troubles.append(str(error))

    def take(self, step: int, at: float, values: Mapping[str, float]) -> Iterator[Row]:
        """The row of what is new in `values`, if there is any."""
        fresh: dict[str, float] = {}
        for name, value in values.items():
            metric = name.translate(_CONTROLS)
            known = self._values.setdefault(metric, OrderedDict())
            if step > self._last.get(metric, -1):
                fresh[metric] = known[step] = float(value)
                self._last[metric] = step
                if len(known) > _REMEMBERED:
                    known.popitem(last=False)
            elif step in known and not metric.startswith(_OF_THE_MACHINE) and not _same(known[step], float(value)):
                self.differing += 1
                first = f"{self._stage}/{metric} at step {step}: first {known[step]:g}, redone {value:g}"
                self.difference = self.difference or first
        if fresh:
            yield Row(self._stage, step, at, fresh)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
