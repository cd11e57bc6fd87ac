"""What `Control` gives to whoever looks at a run again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from posttrain.api.values import RunStatus
    from posttrain.domain.records import RunRecord


class Watcher(Protocol):
    """Looks at one run again and again."""

    def read(self) -> RunStatus:
        """The run as it is now."""


class Vigil(Protocol):
    """Waits for a run that somebody else drives."""

    def look(self) -> RunRecord:
        """The run as it is now. Raises DeadlineError when the time is up."""

    def rest(self, seconds: float) -> None:
        """Until the next look."""
