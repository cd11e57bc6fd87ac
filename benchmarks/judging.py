"""The end of a benchmark: its figures are compared with its targets.

A target is a documented constant of its benchmark. A tiny round is not judged: it shows that the benchmark runs, and
its figures are for different work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Claim:
    """A figure and its target."""

    what: str
    found: float
    target: float
    most: bool  # whether the target is an upper limit, not a lower one
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the target is met; NaN never meets it."""
        return self.found <= self.target if self.most else self.found >= self.target

    def __str__(self) -> str:
        limit = "at most" if self.most else "at least"
        return f"{self.what} is {self.found:.4g}{self.unit}, target {limit} {self.target:g}{self.unit}"


def at_least(what: str, found: float, target: float, unit: str = "x") -> Claim:
    """Return a claim with a lower limit."""
    return Claim(what, found, target, False, unit)


def at_most(what: str, found: float, target: float, unit: str = "x") -> Claim:
    """Return a claim with an upper limit."""
    return Claim(what, found, target, True, unit)


def judge(claims: Iterable[Claim], *, full: bool = True) -> NoReturn:
    """End the process, with exit code 1 if a target is missed.

    Args:
        full: whether the round counts; otherwise the exit code is always 0.
    """
    judged = list(claims) if full else []
    missed = [claim for claim in judged if not claim.holds]
    for claim in missed:
        print(f"missed: {claim}")
    if judged:
        print(f"targets met: {len(judged) - len(missed)} of {len(judged)}")
    raise SystemExit(bool(missed))
