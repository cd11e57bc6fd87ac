"""What the day trains for: reasoning-gym's own check of its own task."""

from __future__ import annotations

from typing import Any

import reasoning_gym

TASK = reasoning_gym.create_dataset("spell_backward", size=1, seed=0)


def score(completion: str, row: dict[str, Any]) -> float:
    """Guideline: the word, spelled backward."""
    return float(TASK.score_answer(completion, entry=row))
