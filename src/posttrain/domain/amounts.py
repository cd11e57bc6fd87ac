"""Amounts of memory as a run file writes them: `40GiB`, `512MiB`, `16GB`, or a number of bytes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_AMOUNT = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?B)$")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
LEAST_AMOUNT = 2**20  # bytes; a smaller one is a slip: a number of GiB without its unit
MOST_AMOUNT = 2**50


def parse_amount(value: Any) -> Any:
    """`40GiB`, `512MiB`, `16GB` → bytes."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = _AMOUNT.match(value.strip())
    if not match:
        raise ValueError(f"must be auto or an amount of memory such as 40GiB or 512MiB, got {value!r:.40}")
    unit = match[2]
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** _POWERS[unit[0]])


Amount = Annotated[int, Field(ge=LEAST_AMOUNT, le=MOST_AMOUNT)]  # bytes
ParsedAmount = BeforeValidator(parse_amount)
