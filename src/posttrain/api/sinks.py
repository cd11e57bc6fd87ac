"""What is asked of sinks: where events go, how each stands, and what a person does about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from posttrain.domain.ids import Name
    from posttrain.domain.sinks import SinkView


class Sinks(Protocol):
    """Telling the outside of events."""

    def sinks(self) -> list[SinkView]:
        """Every sink, and how far it is."""

    def add_sink(
        self, name: Name, kind: str, settings: Mapping[str, Any], rule: Mapping[str, Any], *, from_start: bool = False
    ) -> SinkView:
        """Tell a place of events from now on.

        Args:
            kind: webhook | jsonl | email.
            settings: where it is, and the names of what holds its secrets; see its back-end.
            rule: of which events; see `domain.sinks.Rule`.
            from_start: of every event that the log has, too.

        Raises:
            InputError: settings or a rule that mean nothing. ConflictError: there is a sink of this name.
        """

    def test_sink(self, name: Name) -> str:
        """Send it a message that is marked as a test; where it went.

        Raises:
            SinkError: it did not take it.
        """

    def pause_sink(self, name: Name) -> SinkView:
        """Tell it of nothing until `resume_sink`; what happens meanwhile waits."""

    def resume_sink(self, name: Name, *, skip: bool = False) -> SinkView:
        """Deliver again, and at once, also where a back-off would wait.

        Args:
            skip: leave out what it was not told of so far.
        """

    def remove_sink(self, name: Name) -> None:
        """Forget it."""
