"""What a check of `doctor` says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    state: str  # ok | warn | fail
    finding: str
    remedy: str = ""
