"""Reading the answer out of a response. Exact and cheap, so that a gate's numbers need no judge."""

from __future__ import annotations

import re

from posttrain.domain.errors import InputError


def answer_pattern(extract: str) -> re.Pattern[str]:
    """Compile an `extract` expression.

    Raises:
        InputError: it is no regular expression.
    """
    try:
        return re.compile(extract)
    except re.error as error:
        raise InputError(f"extract must be a regular expression, got {extract!r}: {error}") from error


def extract_answer(pattern: re.Pattern[str], response: str) -> str | None:
    """Group 1 (the whole match without groups) of the last match that is not empty; None without one.

    Empty matches are passed over because an expression such as `(.*)` matches once more at the very end.
    """
    last: str | None = None
    for match in pattern.finditer(response):
        text = match.group(1) if pattern.groups else match.group(0)
        if match.group(0):
            last = text
    return last
