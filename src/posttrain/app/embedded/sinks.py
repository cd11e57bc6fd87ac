"""Sinks of this workspace. What a verb needs is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace
    from posttrain.domain.sinks import SinkView


class Sinks:
    """See `api.sinks.Sinks`."""

    workspace: Workspace

    def sinks(self) -> list[SinkView]:
        """See `Sinks.sinks`."""
        from posttrain.app.sinks import views

        return views(self.workspace)

    def add_sink(
        self, name: str, kind: str, settings: Mapping[str, Any], rule: Mapping[str, Any], *, from_start: bool = False
    ) -> SinkView:
        """See `Sinks.add_sink`."""
        from posttrain.app.sinks import add, view

        add(self.workspace, name, kind, settings, rule, from_start=from_start)
        return view(self.workspace, name)

    def test_sink(self, name: str) -> str:
        """See `Sinks.test_sink`."""
        from posttrain.app.sinks import send_test

        return send_test(self.workspace, name)

    def pause_sink(self, name: str) -> SinkView:
        """See `Sinks.pause_sink`."""
        from posttrain.app.sinks import pause, view

        pause(self.workspace, name)
        return view(self.workspace, name)

    def resume_sink(self, name: str, *, skip: bool = False) -> SinkView:
        """See `Sinks.resume_sink`."""
        from posttrain.app.sinks import resume, view

        resume(self.workspace, name, skip=skip)
        return view(self.workspace, name)

    def remove_sink(self, name: str) -> None:
        """See `Sinks.remove_sink`."""
        from posttrain.app.sinks import remove

        remove(self.workspace, name)
