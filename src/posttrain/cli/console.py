"""Console output of commands, and shell completions that are loaded on demand.

Output has no colours if NO_COLOR is set, and no line breaks of the console in a pipe. People get text, and programs get
JSON. Completions are imported only when a shell requests them.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from posttrain.api.control import Control

_C0 = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}  # symbols, such as ␛ for ESC
_DIRECTIONS = (*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C)
_UNSHOWN = (
    *range(0x80, 0xA0),
    *_DIRECTIONS,
    *range(0xD800, 0xE000),
)  # C1 controls, direction controls, lone surrogates
_PICTURES = {**_C0, 0x7F: 0x2421, **dict.fromkeys(_UNSHOWN, 0xFFFD)}
_COMMANDS = re.compile("[" + "".join(map(chr, (0x7F, *_UNSHOWN))) + "]")  # json.dumps does not escape these
OPENED = ExitStack()  # resources of this process's command, closed when it ends
PIPE_WIDTH = 1_000_000  # columns without a terminal, so no line is cut in a pipe


@dataclass
class Asked:
    """The `--server` and `--project` options of this process's command, which all its threads share."""

    command: re.Pattern[str] = re.compile("")  # the start of a command that uses a project
    options: str = ""


_HERE = Asked()


class Output(StrEnum):
    """The values of `-o`."""

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


def open_control() -> Control:
    """Open a `Control` with `app.control`, which is imported on demand; close the `Control` when the command ends."""
    from posttrain.app.control import open_control as opened

    control = opened()
    OPENED.callback(control.close)
    return control


def console() -> Console:
    """Return a console on stdout that shows control characters in texts as symbols.

    The console uses colours only on a terminal without NO_COLOR, and does not wrap lines in a pipe.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Harmless(Console):
        """Makes the text of every segment harmless; rich keeps its codes (cursor, colours) outside that text."""

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(harmless(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            """Raise BrokenPipeError, because rich would exit with 1, which is Posttrain's exit code for a bug."""
            raise BrokenPipeError

    interactive = sys.stdout.isatty()
    return Harmless(highlight=False, soft_wrap=not interactive, width=None if interactive else PIPE_WIDTH)


def show(*drawn: RenderableType) -> None:
    """Print each renderable on stdout, starting on a new line."""
    screen = console()
    for one in drawn:
        screen.print(one)


def tinted(words: str, tint: str = "") -> Text:
    """Return a styled text, for `show` and tables."""
    from rich.text import Text

    return Text(words, style=tint)


def plain_table(*titles: str, right: Collection[str] = ()) -> Table:
    """Return a table without borders and wrapping, with a column per title; columns in `right` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", no_wrap=True)
    return table


def branch(label: Text) -> Text:
    """Return a line of a tree, complete in a pipe and cut with an ellipsis at a terminal's width."""
    label.no_wrap, label.overflow = True, "ellipsis"
    return label


def excerpt(text: str, most: int) -> str:
    """Return a text on one line: complete in a pipe, at most `most` characters on a terminal."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most or not sys.stdout.isatty() else flat[: most - 1] + "…"


def harmless(text: str) -> str:
    """Return a text without terminal controls: each control character is replaced by a visible symbol.

    Names, prompts, errors and log lines come from files and jobs. Escape sequences move the cursor, overwrite earlier
    lines, or set the clipboard; direction controls reorder the displayed characters.
    """
    return text.translate(_PICTURES)


def say(*lines: str, quoted: bool = False) -> None:
    """Print lines for a person, without markup.

    Args:
        quoted: whether the lines quote other text; commands in quoted text stay unchanged.
    """
    for line in lines:
        typer.echo(harmless(line if quoted else as_typed(line)))


def aside(*lines: str) -> None:
    """Print lines on stderr, separate from the command's output."""
    for line in lines:
        typer.echo(harmless(as_typed(line)), err=True)


def ask_at(options: Mapping[str, str | None], verbs: Iterable[str]) -> None:
    """Record this command's `--server` and `--project`, so that printed commands repeat these options.

    Printed commands do not repeat values from the environment, because the next command reads the same environment.

    Args:
        options: the values of `--server` and `--project`; None: not given.
        verbs: the commands that use a project.
    """
    words = [f"{name} {shlex.quote(value)}" for name, value in options.items() if value]
    _HERE.command = re.compile(rf"\bposttrain (?=(?:{'|'.join(verbs)})\b)")
    _HERE.options = "".join(f"{word} " for word in words)


def as_typed(text: str) -> str:
    """Return a text with this command's `--server` and `--project`, if given, added to the commands in the text."""
    return _HERE.command.sub(lambda found: f"{found[0]}{_HERE.options}", text) if _HERE.options else text


@contextmanager
def said_after(seconds: float, line: str) -> Iterator[None]:
    """Print a line on stderr if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, aside, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def pass_on(text: str, *, end: bool) -> None:
    """Print another program's text as it arrives, with its line breaks.

    Args:
        end: whether to add a missing line break at the end.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")  # each state of a progress bar gets its own line
    typer.echo(harmless(lines), nl=end and not lines.endswith("\n"))


def emit_json(value: Any) -> None:
    """Print one JSON document on stdout. NaN and infinities become null, because JSON has no such numbers."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str)
    typer.echo(_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def answer_json(output: Output, value: Callable[[], Any]) -> None:
    """Print JSON if the caller requested it, and end the command.

    Raises:
        typer.Exit: JSON was requested.
    """
    if output is Output.JSON:
        emit_json(value())
        raise typer.Exit


def style(state: str) -> str:
    """Return the colour of a state, an outcome or a check."""
    return _STYLES.get(state, "dim")


def glyph(state: str, encoding: str | None = None) -> str:
    """Return one character for a state; an ASCII character if the terminal cannot show other characters."""
    mark = _GLYPHS.get(state, "·")
    try:
        # the real stdout: while a table redraws itself, `sys.stdout` is a proxy without an encoding
        mark.encode(encoding or getattr(sys.__stdout__, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_GLYPHS[mark]
    return mark


def digest(full: str | None) -> str:
    """Return `sha256:0123456789ab` for a full digest."""
    return full[:19] if full else "-"


def count(number: float | None) -> str:
    """Return a count as `812`, `41k` or `3.2M`."""
    if number is None or not math.isfinite(number):
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """Return seconds as `6s`, `2m05s` or `3h20m`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def ago(at: float | None) -> str:
    """Return a time as `3 minutes ago`."""
    if at is None:
        return "-"
    passed = max(0.0, time.time() - at)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        number = int(passed // size)
        if number:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"


def moment(at: float | None) -> str:
    """Return the local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at is not None else "-"


def number(value: float | None) -> str:
    """Return a number with four significant digits."""
    return "-" if value is None else f"{value:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def lazily(name: str) -> Callable[[str], list[str]]:
    """Return a function that calls the function `name` of `cli.completion`.

    The module is imported only at the call, because it loads the workspace.
    """

    def complete(incomplete: str) -> list[str]:
        found: list[str] = getattr(import_module("posttrain.cli.completion"), name)(incomplete)
        return found

    return complete
