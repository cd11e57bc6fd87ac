"""Reading the answer out of a response. Exact and cheap, so that a gate's numbers need no judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from posttrain.domain.errors import InputError

_SECONDS = 5.0  # that finding the answer in one response may take: a hundred thousand times what it takes


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


class Extractor:
    """Reads an answer out of a response by a regular expression with a group.

    Args:
        extract: as Python's `re` has it.

    Raises:
        InputError: it is no regular expression.
    """

    def __init__(self, extract: str) -> None:
        try:
            self._pattern = regex.compile(extract)
        except (regex.error, RecursionError) as error:
            raise InputError(f"extract must be a regular expression, got {extract!r}: {error}; mend it") from error

    def __call__(self, response: str) -> str | None:
        """Group 1 of the last match that is not empty; None without one.

        Empty matches are passed over because an expression such as `(.*)` matches once more at the very end.

        Raises:
            InputError: it took longer than any expression should.
        """
        last: str | None = None
        try:
            for match in self._pattern.finditer(response, timeout=_SECONDS):
                if match.group(0):
                    last = match.group(1)
        except TimeoutError:
            raise InputError(
                f"extract must find its answer within {_SECONDS:g} s, got {self._pattern.pattern!r} still searching a "
                f"response of {len(response)} characters; avoid repetitions inside repetitions"
            ) from None
        return last
