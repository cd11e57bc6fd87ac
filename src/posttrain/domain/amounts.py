"""Amounts of memory as a run file writes them: `40GiB`, `512MiB`, `16GB`, or a number of bytes.

Lengths of time as a run file writes them: `90s`, `10m`, `2h`, `1d`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_AMOUNT = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?B)$")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
LEAST_AMOUNT = 2**20  # bytes; a smaller one is a slip: a number of GiB without its unit
MOST_AMOUNT = 2**50
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|h|d)?$")
LONGEST = 3650 * 86400.0  # seconds that may be declared; more is a slip
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEAST_STALL = 10.0  # seconds; in a quarter of it a job that is well says that a step or a phase is over


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


def parse_duration(value: Any) -> Any:
    """`90`, `90s`, `10m`, `2h`, `1d` → seconds."""
    if isinstance(value, str):
        match = _DURATION.match(value.strip())
        if not match:
            raise ValueError(f"must be a duration such as 90s, 10m or 2h, got {value!r}")
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
        if seconds > LONGEST:
            raise ValueError(f"must be at most {LONGEST / _UNITS['d']:.0f}d, got {value:.40}")
        return seconds
    return value


# `runtime.stall_after`: how long a job may report no progress before it is taken for hung
StallAfter = Annotated[float, Field(ge=LEAST_STALL, le=LONGEST), BeforeValidator(parse_duration)]
