"""Tables of the reference: on a phone each row stands as a block of its own, by the site's style sheet."""

from __future__ import annotations

from collections.abc import Sequence


def stacked(lines: Sequence[str]) -> str:
    """A Markdown table of name, value, default and meaning, marked for the style sheet."""
    table = "\n".join(lines)
    return f":::{{container}} stacked\n{table}\n:::"
