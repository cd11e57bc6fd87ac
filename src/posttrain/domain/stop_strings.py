"""Strings that end a response: which may be asked for."""

from __future__ import annotations

from collections.abc import Sequence

MOST_STOPS, MOST_STOP = 16, 256  # strings, and characters of one


def stop_fault(stop: Sequence[str]) -> str | None:
    """What is wrong with stop strings; None: nothing."""
    if isinstance(stop, str):  # whose letters would be taken for strings
        return f"must be a list of strings, got the string {stop[:20]!r}; write [{stop[:20]!r}]"
    if len(stop) > MOST_STOPS:
        return f"must be at most {MOST_STOPS} strings, got {len(stop)}; leave some out"
    for one in stop:
        if not 1 <= len(one) <= MOST_STOP:
            return f"must hold strings of 1 to {MOST_STOP} characters, got {len(one)}: {one[:20]!r}; mend or remove it"
        if any(sign == "\ufffd" or "\ud800" <= sign <= "\udfff" for sign in one):
            return f"must hold text, got {one!r}, of which a part stands for no character; remove it"
    return None
