"""The commands that README and docs tell a reader to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PROGRAMS = r"(?:make|posttrain|pip|git|bash|python3?|\.venv/bin/\w+|\$) "


@dataclass(frozen=True, slots=True)
class Command:
    """One command and where it stands."""

    page: str
    line: int
    text: str
    inline: bool = False  # in a sentence, where `posttrain plan` is the verb's name

    @property
    def words(self) -> list[str]:
        """Without its comment."""
        return shlex.split(self.text, comments=True)


def commands() -> Iterator[Command]:
    """Every indented line, every line after `$ ` in a fence, every inline code that begins with a program's name."""
    for page in PAGES:
        fenced = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif fenced:
                found = [line[2:]] if line.startswith("$ ") else []
                yield from (Command(page.name, number, text) for text in found)
            elif line.startswith("    ") and line.strip():
                yield Command(page.name, number, line.strip())
            else:
                inline = re.findall(rf"`({_PROGRAMS}[^`]*)`", line)
                yield from (Command(page.name, number, text.removeprefix("$ "), inline=True) for text in inline)


def fences(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
