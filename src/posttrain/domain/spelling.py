"""What somebody may have meant who wrote a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or the known names when nothing is near; empty when nothing is known."""
    names = sorted(known)
    return meant(word, names) or (f" (known: {', '.join(names)})" if names else "")


def meant(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`; empty when nothing known is near."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def meant_name(principal: str, known: Iterable[str]) -> str:
    """As `meant`, of `user:NAME` and `service:NAME`: by the names alone, since what all begin with makes all alike."""
    names = {one.partition(":")[2]: one for one in sorted(known)}
    close = difflib.get_close_matches(principal.partition(":")[2], names, n=1, cutoff=0.5)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""
