"""What a step sampled, in numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.rewards.port import Score

_NAMED = re.compile(r"[\w.+-][\w.+ /-]{0,63}", re.ASCII)  # a component whose name may be part of a metric's


def rollout_metrics(groups: Sequence[ScoredGroup], *, judged: bool = True) -> dict[str, float]:
    """Means over the step. `entropy` is the sampled estimate −E[log μ] per token, at the sampling temperature.

    `reward/stderr` is the standard error of `reward/mean`.

    Args:
        judged: whether somebody scores; else nothing is said of rewards.
    """
    scores = [score for group in groups for score in group.scores]
    answers = [answer for group in groups for answer in group.answers]
    rewards = np.concatenate([group.rewards for group in groups])
    scored = rewards[~np.isnan(rewards)]
    tokens = sum(answer.generated for answer in answers)
    mean = {"reward/mean": float(scored.mean()), "reward/std": float(scored.std())} if len(scored) else {}
    reward = {
        **mean,
        **_standard_error(groups),
        **_component_metrics(scores),
        "reward/unscored": 1.0 - len(scored) / len(rewards),
        "reward/errors": sum(score.status == "error" for score in scores) / len(scores),
        "reward/timeouts": sum(score.status == "timeout" for score in scores) / len(scores),
    }
    return {
        **(reward if judged else {}),
        "response_tokens/mean": tokens / len(answers),
        "truncated": sum(answer.truncated for answer in answers) / len(answers),
        "entropy": -sum(float(answer.logprobs.sum(dtype="float64")) for answer in answers) / max(tokens, 1),
    }


def engine_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """What the rollout's engine took, as far as it counts: rows that it decoded side by side in the mean, preemptions,
    tokens that it computed again for them, tokens of prompts.
    """
    named = ("preemptions", "recomputed_tokens", "prefilled_tokens")
    steps, decoded = counts.get("steps", 0), counts.get("decoded_tokens")
    rows = {"rollout/rows": decoded / steps} if steps and decoded is not None else {}
    return {**rows, **{f"rollout/{name}": float(counts[name]) for name in named if name in counts}}


def turn_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Responses of a sample, in the mean, and the share of samples whose environment failed."""
    answers = [answer for group in groups for answer in group.answers]
    return {
        "turns/mean": sum(len(answer.turns) for answer in answers) / len(answers),
        "turns/errors": sum(answer.status == "error" for answer in answers) / len(answers),
    }


def _component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`reward/NAME/mean` and `/std` of every component over the completions that have it; of rewards with weights also
    the shares that failed.
    """
    found: dict[str, float] = {}
    for name in sorted({name for score in scores for name in score.components if _NAMED.fullmatch(name)}):
        values = np.array([s.components[name] for s in scores if name in s.components], dtype=np.float64)
        found |= {f"reward/{name}/mean": float(values.mean()), f"reward/{name}/std": float(values.std())}
    for name in sorted({name for score in scores for name in score.parts}):
        parts = [score.parts[name] for score in scores if name in score.parts]
        for word, status in (("errors", "error"), ("timeouts", "timeout")):
            found[f"reward/{name}/{word}"] = sum(part.status == status for part in parts) / len(parts)
    return found


def _standard_error(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """How far a step's mean reward strays by the prompts it happened to draw: deviation of group means / √groups.

    Samples of one prompt are alike, so they do not count as so many independent ones.
    """
    scored = [rewards[~np.isnan(rewards)] for rewards in (group.rewards for group in groups)]
    means = np.array([rewards.mean() for rewards in scored if len(rewards)])
    return {"reward/stderr": float(means.std(ddof=1) / len(means) ** 0.5)} if len(means) > 1 else {}
