"""How commands write: a console that honours NO_COLOR and pipes, JSON for programs, words for people."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160  # columns where there is no terminal to ask


class Output(StrEnum):
    """What `-o` takes."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text for people, json for programs.")]

_STYLES = {
    "succeeded": "green",
    "pass": "green",
    "ok": "green",
    "running": "cyan",
    "launched": "cyan",
    "stopping": "yellow",
    "stopped": "yellow",
    "inconclusive": "yellow",
    "warn": "yellow",
    "rejected": "red",
    "failed": "red",
    "fail": "red",
    "error": "red",
    "lost": "red",
}
_GLYPHS = {
    "succeeded": "✔",
    "running": "●",
    "stopping": "◌",
    "stopped": "■",
    "rejected": "✘",
    "failed": "✘",
    "skipped": "↷",
    "ready": "○",
    "pending": "·",
}
_PLAIN_GLYPHS = {"✔": "+", "●": "*", "◌": "-", "■": "-", "✘": "x", "↷": ">", "○": ".", "·": "."}


def console() -> Console:
    """A console on stdout. Colours only on a terminal and without NO_COLOR; wide lines into a pipe."""
    from rich.console import Console

    interactive = sys.stdout.isatty()
    return Console(highlight=False, soft_wrap=not interactive, width=None if interactive else PIPE_WIDTH)


def say(*lines: str) -> None:
    """Lines for a person, without markup."""
    for line in lines:
        typer.echo(line)


def emit_json(value: Any) -> None:
    """One JSON document on stdout. NaN and infinities become null: JSON has no word for them."""
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str))


def style(state: str) -> str:
    """The colour of a state, an outcome or a check."""
    return _STYLES.get(state, "dim")


def glyph(state: str, encoding: str | None = None) -> str:
    """One character for a state; ASCII where the terminal has no more."""
    mark = _GLYPHS.get(state, "·")
    try:
        # the real stdout: while a table redraws itself, `sys.stdout` is a proxy that knows no encoding
        mark.encode(encoding or getattr(sys.__stdout__, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_GLYPHS[mark]
    return mark


def digest(full: str | None) -> str:
    """`sha256:0123456789ab` of a full digest."""
    return full[:19] if full else "-"


def count(number: float | None) -> str:
    """`812`, `41k`, `3.2M`."""
    if number is None or not math.isfinite(number):
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """`6s`, `2m05s`, `3h20m`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def ago(at: float | None) -> str:
    """`3 minutes ago`."""
    if at is None:
        return "-"
    passed = max(0.0, time.time() - at)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        number = int(passed // size)
        if number:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"


def moment(at: float | None) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at is not None else "-"


def number(value: float | None) -> str:
    """Four significant digits."""
    return "-" if value is None else f"{value:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
