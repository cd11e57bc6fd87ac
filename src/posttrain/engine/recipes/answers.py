"""Reading the answer out of a response. Exact and cheap, so that a gate's numbers need no judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.domain.errors import InputError


def reference_answer(row: Mapping[str, Any], name: str, number: int) -> str:
    """What a response to this row is compared with.

    Args:
        name, number: how errors call the data set and the row (from 1).

    Raises:
        InputError: the row's `answer` is missing, or something that no text equals.
    """
    answer = row.get("answer")
    if isinstance(answer, str):
        return answer
    found = f"columns {', '.join(sorted(row))}" if answer is None else f"{answer!r:.60}"
    raise InputError(f"{name} row {number} must have an answer (text or a number) to be compared with, got {found}")


def is_correct(extracted: str | None, answer: str) -> bool:
    """Exactly the answer; a response from which nothing could be extracted is wrong whatever the answer."""
    return extracted is not None and extracted == answer


def extract_answer(pattern: re.Pattern[str], response: str) -> str | None:
    """Group 1 of the last match that is not empty; None without one.

    Empty matches are passed over because an expression such as `(.*)` matches once more at the very end.
    """
    last: str | None = None
    for match in pattern.finditer(response):
        if match.group(0):
            last = match.group(1)
    return last
