"""What the tests of rewards share: one kind of call, and how a reward is opened."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.sandbox.port import RewardCall
from posttrain.sandbox.process import ProcessReward

PATIENCE = 300.0  # seconds for what must happen, on a machine as busy as it likes
Opener = Callable[..., ProcessReward]  # source, entry, timeout and dialect


def call(*completions: str, answer: str = "12", **columns: object) -> RewardCall:
    rows = [{"prompt": "Q", "answer": answer, **columns} for _ in completions]
    return RewardCall(["Q"] * len(completions), list(completions), rows)
