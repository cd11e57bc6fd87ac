"""What an evaluation says of a metric before it measures it: the values that one item can have.

A gate's limit rests on that range, so it is declared by whoever makes the metric and never read off the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from posttrain.domain.canonical import digest_json


@dataclass(frozen=True, slots=True)
class ItemRange:
    """The least and the greatest value of one item: `ItemRange(1, 64)` for tokens of a response of at most 64.

    Raises:
        ValueError: not finite, upside down, or binary with ends other than 0 and 1.
    """

    low: float  # in units of the metric
    high: float
    binary: bool = False  # values are 0 or 1, nothing between

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"range of a metric must be two finite numbers in order, got {self.low} to {self.high}")
        if self.binary and (self.low, self.high) != (0.0, 1.0):
            raise ValueError(f"range of a binary metric must be 0 to 1, got {self.low} to {self.high}")

    @property
    def span(self) -> float:
        """How far two values can be apart: a difference of two models' values lies in [-span, span]."""
        return self.high - self.low


RATE = ItemRange(0.0, 1.0, binary=True)  # an item is right or wrong
SHARE = ItemRange(0.0, 1.0)  # a share of an item's samples


ENOUGH_SEEDS = 3  # of each setting: what two agree on, a third may not
_COMPARED = ("accuracy", "sampled_accuracy")
QUANTITIES = (*_COMPARED, "response_tokens", "truncated", "reward", "sampled_reward", "pass@1")  # pass@k: any k


def compares(metric: str) -> bool:
    """Whether a metric of an evaluation compares responses with the rows' answers."""
    quantity = metric.rpartition("/")[2]
    return quantity in _COMPARED or quantity.startswith("pass@")


def measurable(metric: str) -> bool:
    """Whether an evaluation can make a metric of this name: `heldout/accuracy`, `heldout/pass@8`."""
    quantity = metric.rpartition("/")[2]
    return quantity in QUANTITIES or (quantity.startswith("pass@") and quantity[5:].isdecimal())


def better(metric: str) -> Literal["higher", "lower"] | None:
    """Which way a metric of an evaluation improves; None where that is a matter of taste, as with lengths."""
    quantity = metric.partition("/")[2] or metric
    if quantity == "truncated":
        return "lower"
    return None if quantity == "response_tokens" else "higher"


def item_id(text: str, answer: str | None) -> str:
    """The name of an item of a suite: equal rows of any data sets are one item.

    Args:
        text: its prompt as one text.
        answer: None: a reward scores it.
    """
    return digest_json({"prompt": text, "answer": answer})


def few_seeds(seeds: int) -> tuple[str, ...]:
    """A warning where so many seeds of each setting are compared; none where they are enough to tell settings apart."""
    if seeds >= ENOUGH_SEEDS:
        return ()
    return (
        f"{seeds} seed{'s' * (seeds != 1)} of each setting compared: on a steep learning curve seeds alone move a "
        f"score more than settings do; compare {ENOUGH_SEEDS} or more (posttrain sweep --seeds {ENOUGH_SEEDS})",
    )
