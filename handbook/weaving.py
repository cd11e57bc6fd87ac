"""Changes to a page before the site renders it; on disk a page stays plain Markdown.

A line `<!-- made by handbook.NAME -->` is replaced by the result of `handbook.NAME.page()`, so no stored copy of the
reference can become stale. A table of fields is marked for the style sheet. A Mermaid state diagram becomes a table,
which needs no script. A link to a folder outside docs/ becomes text.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from handbook.tables import stacked

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = re.compile(r"^<!-- made by handbook\.(\w+) -->$", re.MULTILINE)
FIELDS = re.compile(r"^(<!-- fields:(?!end )([\w-]+) -->)$(.*?)^(<!-- fields:end -->)$", re.MULTILINE | re.DOTALL)
_DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)\s#]+)\)")


def woven(text: str, folder: Path) -> str:
    """Return a page's Markdown for rendering.

    Args:
        text: the page's Markdown.
        folder: the page's folder.
    """
    text = MADE.sub(lambda found: import_module(f"handbook.{found[1]}").page(), text)
    text = FIELDS.sub(lambda found: stacked([found[3].strip()]), text)
    text = _DIAGRAM.sub(lambda found: _table(found[1]), text)
    return _LINK.sub(lambda found: found[1] if (folder / found[2]).is_dir() else found[0], text)


def setup(app: Any) -> dict[str, bool]:
    """Register the changes with Sphinx, which calls this function."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Any, name: str, source: list[str]) -> None:
    source[0] = woven(source[0], Path(app.env.doc2path(name)).parent)


def _table(diagram: str) -> str:
    onward: dict[str, list[str]] = {}
    for state, following in re.findall(r"^ +(\S+) --> (\S+)$", diagram, re.MULTILINE):
        onward.setdefault(state, []).append(following)
    named = {"[*]": "*begins as*"}
    rows = [
        f"| {named.get(state, state)} | {', '.join(found).replace('[*]', '*ends*')} |"
        for state, found in onward.items()
    ]
    return "\n".join(["| state | goes on to |", "|---|---|", *rows])
