"""Tables of the reference; on a phone the site's style sheet shows each row as a block."""

from __future__ import annotations

from collections.abc import Sequence


def stacked(lines: Sequence[str]) -> str:
    """Return a Markdown table of name, value, default and meaning, marked for the style sheet."""
    table = "\n".join(lines)
    return f":::{{container}} stacked\n{table}\n:::"
