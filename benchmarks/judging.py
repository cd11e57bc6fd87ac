"""How benchmarks end: what each aims at is held against what it measured.

A target is a constant of its benchmark, which says what it means. A tiny round judges nothing: it shows that the
benchmark runs, and its figures are those of other work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Claim:
    """A figure beside its target."""

    what: str
    found: float
    target: float
    most: bool  # the target is an upper limit, else a lower one
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the target is met; NaN meets none."""
        return self.found <= self.target if self.most else self.found >= self.target

    def __str__(self) -> str:
        limit = "at most" if self.most else "at least"
        return f"{self.what} is {self.found:.4g}{self.unit}, target {limit} {self.target:g}{self.unit}"


def at_least(what: str, found: float, target: float, unit: str = "x") -> Claim:
    """A figure of which more is better."""
    return Claim(what, found, target, False, unit)


def at_most(what: str, found: float, target: float, unit: str = "x") -> Claim:
    """A figure of which less is better."""
    return Claim(what, found, target, True, unit)


def judge(claims: Iterable[Claim], *, full: bool = True) -> NoReturn:
    """End the process, with exit code 1 where a target is missed.

    Args:
        full: a round that can tell; another one ends with 0, whatever it found.
    """
    judged = list(claims) if full else []
    missed = [claim for claim in judged if not claim.holds]
    for claim in missed:
        print(f"missed: {claim}")
    if judged:
        print(f"targets met: {len(judged) - len(missed)} of {len(judged)}")
    raise SystemExit(bool(missed))
