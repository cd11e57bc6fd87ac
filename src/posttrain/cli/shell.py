"""Completions that are looked up only when a shell asks for them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def lazily(name: str) -> Callable[[str], list[str]]:
    """The function of this name in `cli.completion`, which opens the workspace: no other command should load it."""

    def complete(incomplete: str) -> list[str]:
        found: list[str] = getattr(import_module("posttrain.cli.completion"), name)(incomplete)
        return found

    return complete
