"""Parts of pages that lie on disk as the code makes them; `python -m handbook.blocks` writes them anew.

A part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from handbook import http, reasons, states
from handbook.weaving import DOCS

BLOCKS: Mapping[str, tuple[str, Callable[[], str]]] = {  # page → name of its part, what makes it
    "api.md": ("endpoints", http.table),
    "architecture.md": ("lifecycle", states.diagrams),
    "reference/reasons.md": ("reasons", reasons.table),
}


def made(page: str, text: str) -> str:
    """A page's text with its part made anew.

    Raises:
        ValueError: the part's marks are not there once each, in order.
    """
    name, make = BLOCKS[page]
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"docs/{page} must have {begin} and {end} once each, in this order; write them")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return f"{before}{begin}\n\n{make()}\n\n{after}"


def write(docs: Path = DOCS) -> None:
    """Make every part anew."""
    for page in BLOCKS:
        path = docs / page
        path.write_text(made(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
