"""Generated parts of pages, which are stored in the pages; `python -m handbook.blocks` writes them.

A part is between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, a table of fields between `<!-- fields:KIND -->` and
`<!-- fields:end -->`. A test checks that the stored parts are current.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from handbook import codes, http, kinds, reasons, remedies, states, verbs
from handbook.weaving import DOCS, FIELDS

BLOCKS: Mapping[str, tuple[str, Callable[[], str]]] = {  # page → (name of its part, generator)
    "api.md": ("endpoints", http.table),
    "architecture.md": ("lifecycle", states.diagrams),
    "reference/codes.md": ("codes", codes.page),
    "reference/commands.md": ("commands", verbs.overview),
    "reference/reasons.md": ("reasons", reasons.table),
    "remedies.md": ("symptoms", remedies.sections),
}


def pages(docs: Path = DOCS) -> list[str]:
    """Return the pages that have a generated part, sorted."""
    tables = [docs / "run-yaml.md", *(docs / "run-yaml").glob("*.md")]
    return sorted({*BLOCKS, *(path.relative_to(docs).as_posix() for path in tables)})


def made(page: str, text: str) -> str:
    """Return a page's text with its parts generated again.

    Raises:
        ValueError: the marks of a part do not each appear once, in order.
    """
    if page in BLOCKS:
        name, make = BLOCKS[page]
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"docs/{page} must have {begin} and {end} once each, in this order; write them")
        before, after = text[: text.index(begin)], text[text.index(end) :]
        text = f"{before}{begin}\n\n{make()}\n\n{after}"
    if text.count("<!-- fields:") != 2 * len(FIELDS.findall(text)):
        raise ValueError(f"docs/{page} must have a <!-- fields:end --> after every <!-- fields:KIND -->; write it")
    return FIELDS.sub(lambda found: f"{found[1]}\n\n{kinds.table(found[2], page)}\n\n{found[4]}", text)


def write(docs: Path = DOCS) -> None:
    """Generate and write every part."""
    for page in pages(docs):
        path = docs / page
        path.write_text(made(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
