"""Pages of the documentation as they are rendered, and the blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from documents import PAGES, ROOT
from handbook.weaving import woven

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block and where it stands."""

    page: str  # from the repository's root
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that the block is, where its first line says so: `# reward.py`."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found[1] if found else ""


def rendered(page: Path) -> str:
    """A page with its generated parts."""
    return woven(page.read_text(encoding="utf-8"), page.parent)


def blocks(*languages: str) -> Iterator[Block]:
    """Every block in one of these languages, on all pages, in the order of the pages."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        for found in _FENCE.finditer(text):
            if found[2] in languages:
                lines = [line.removeprefix(found[1]) for line in found[3].splitlines(keepends=True)]
                yield Block(name, text.count("\n", 0, found.start()) + 1, found[2], "".join(lines))
