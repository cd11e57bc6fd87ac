"""Console output of commands, and shell completions that are loaded on demand.

The console honours NO_COLOR and pipes; programs get JSON, people get words. Completions are looked up only when a shell
asks for them.
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

_C0 = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}  # ␛ for ESC, and so on
_DIRECTIONS = (*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C)
_UNSHOWN = (
    *range(0x80, 0xA0),
    *_DIRECTIONS,
    *range(0xD800, 0xE000),
)  # C1 controls, writing directions, lone surrogates
_PICTURES = {**_C0, 0x7F: 0x2421, **dict.fromkeys(_UNSHOWN, 0xFFFD)}
_COMMANDS = re.compile("[" + "".join(map(chr, (0x7F, *_UNSHOWN))) + "]")  # what JSON does not escape by itself
OPENED = ExitStack()  # what the command of this process opened: it is closed when that ends
PIPE_WIDTH = 1_000_000  # columns where there is no terminal: whoever reads a pipe cuts for himself


@dataclass
class Asked:
    """Where the command of this process asks, as options named it; every thread of it says so."""

    command: re.Pattern[str] = re.compile("")  # how one begins that asks a project
    options: str = ""


_HERE = Asked()


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


def open_control() -> Control:
    """Open the `Control` of `app.control`, whose imports wait until a command asks; it is closed when that ends."""
    from posttrain.app.control import open_control as opened

    control = opened()
    OPENED.callback(control.close)
    return control


def console() -> Console:
    """A console on stdout that draws by itself and lets no text of others do so.

    Colours only on a terminal and without NO_COLOR; whole lines into a pipe.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Harmless(Console):
        """What a renderable says is text; what rich itself adds (cursor, colours) is not in a segment's text."""

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(harmless(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            """Rich would exit with 1, which stands for a bug here."""
            raise BrokenPipeError

    interactive = sys.stdout.isatty()
    return Harmless(highlight=False, soft_wrap=not interactive, width=None if interactive else PIPE_WIDTH)


def show(*drawn: RenderableType) -> None:
    """Print each of these on stdout, in a line or more of its own."""
    screen = console()
    for one in drawn:
        screen.print(one)


def tinted(words: str, tint: str = "") -> Text:
    """A text in a style, for `show` and for tables."""
    from rich.text import Text

    return Text(words, style=tint)


def plain_table(*titles: str, right: Collection[str] = ()) -> Table:
    """A table without lines whose cells are not wrapped, a column for each title; those in `right` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", no_wrap=True)
    return table


def branch(label: Text) -> Text:
    """A line of a tree: whole in a pipe, cut to a terminal's width with an ellipsis."""
    label.no_wrap, label.overflow = True, "ellipsis"
    return label


def excerpt(text: str, most: int) -> str:
    """A text on one line: whole in a pipe, on a terminal at most so many characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most or not sys.stdout.isatty() else flat[: most - 1] + "…"


def harmless(text: str) -> str:
    """Text in which nothing commands a terminal: a character that would is shown as a picture of itself.

    Names, prompts, errors and log lines come from files and jobs. Escape sequences move the cursor, rewrite what stands
    above, or set the clipboard; controls of the direction of writing make a line read otherwise than it is.
    """
    return text.translate(_PICTURES)


def say(*lines: str, quoted: bool = False) -> None:
    """Lines for a person, without markup.

    Args:
        quoted: they are words of others, in which a command stays as it is.
    """
    for line in lines:
        typer.echo(harmless(line if quoted else as_typed(line)))


def aside(*lines: str) -> None:
    """Lines beside what was asked for: on stderr."""
    for line in lines:
        typer.echo(harmless(as_typed(line)), err=True)


def ask_at(options: Mapping[str, str | None], verbs: Iterable[str]) -> None:
    """Let commands that are said ask where this one asks: of its server and project, if options named them.

    What the environment names, commands that are typed next find there.

    Args:
        options: `--server` and `--project`, None where it has none.
        verbs: that ask a project.
    """
    words = [f"{name} {shlex.quote(value)}" for name, value in options.items() if value]
    _HERE.command = re.compile(rf"\bposttrain (?=(?:{'|'.join(verbs)})\b)")
    _HERE.options = "".join(f"{word} " for word in words)


def as_typed(text: str) -> str:
    """A text of ours in which commands name the server and the project that are asked, where options did."""
    return _HERE.command.sub(lambda found: f"{found[0]}{_HERE.options}", text) if _HERE.options else text


@contextmanager
def said_after(seconds: float, line: str) -> Iterator[None]:
    """Say a line beside what was asked for where the block takes longer than this."""
    timer = threading.Timer(seconds, aside, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def pass_on(text: str, *, end: bool) -> None:
    """Text of somebody else as it comes, its lines kept.

    Args:
        end: whether to end the line if it did not.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")  # a progress bar's lines one below the other
    typer.echo(harmless(lines), nl=end and not lines.endswith("\n"))


def emit_json(value: Any) -> None:
    """One JSON document on stdout. NaN and infinities become null: JSON has no word for them."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str)
    typer.echo(_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def answer_json(output: Output, value: Callable[[], Any]) -> None:
    """Answer with JSON where it is asked for, which ends the command.

    Raises:
        typer.Exit: it is asked for.
    """
    if output is Output.JSON:
        emit_json(value())
        raise typer.Exit


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
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


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
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def lazily(name: str) -> Callable[[str], list[str]]:
    """The function of this name in `cli.completion`, which opens the workspace: no other command should load it."""

    def complete(incomplete: str) -> list[str]:
        found: list[str] = getattr(import_module("posttrain.cli.completion"), name)(incomplete)
        return found

    return complete
