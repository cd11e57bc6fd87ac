"""A sink in memory, for tests: it appends received notices to a list of the caller."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from posttrain.domain.sinks import Notice


class FakeSink:
    """The `Sink` of a list.

    Args:
        trouble: called before every notice; raises `SinkError` to simulate a failing sink.
    """

    kind: ClassVar[str] = "fake"
    most: ClassVar[int] = 8

    def __init__(self, arrived: list[Notice], trouble: Callable[[], None] = lambda: None) -> None:
        self._arrived, self._trouble = arrived, trouble

    @property
    def where(self) -> str:
        """See `Sink.where`."""
        return "memory"

    def send(self, notices: Sequence[Notice]) -> None:
        """See `Sink.send`."""
        for notice in notices:
            self._trouble()
            self._arrived.append(notice)
