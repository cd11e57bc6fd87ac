"""A tracker in memory, for tests; the caller stores the targets by run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.telemetry.tracker import ChannelState, Cursor, Ending, Row, TrackedRun, Tracker, refuse_another


@dataclass
class Target:
    """The data that outlives a tracker: the points in the order of writing, endings, versions and aliases."""

    points: list[tuple[str, str, int, float]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    workspace: str = ""
    versions: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)


class FakeTracker(Tracker):
    """The `Tracker` of a `Target`.

    Args:
        trouble: called before every write; it can raise an error to simulate a failing target.
    """

    kind: ClassVar[str] = "fake"

    def __init__(self, target: Target, trouble: Callable[[], None] = lambda: None) -> None:
        self._target, self._trouble = target, trouble

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return "memory"

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        self._trouble()
        refuse_another(self._target.workspace, run, self.where)
        self._target.workspace = run.workspace or self._target.workspace
        found = Cursor()
        for stage, metric, step, _ in self._target.points:
            found.saw(stage, step, metric)
        return found

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        for row in rows:
            for metric, value in row.values.items():
                self._trouble()
                self._target.points.append((row.stage, metric, row.step, value))

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`."""
        self._trouble()
        self._target.endings.append(ending.state)

    def follow(self, channel: ChannelState) -> None:
        """See `Registry.follow`."""
        self._trouble()
        self._target.versions += [v.digest for v in channel.versions if v.digest not in self._target.versions]
        self._target.aliases[channel.channel] = channel.live
