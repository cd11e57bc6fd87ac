"""The whole way of a few samples through a step, as facts: what `posttrain trace --sample` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from posttrain.domain.facts import Sample
from posttrain.engine.algorithms.losses import is_clipped
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.recipe import Trace
from posttrain.engine.recipes.sampling import Sampled, Scorer


@final
@dataclass(slots=True)
class Witness:
    """Follows the first `groups` groups of a step.

    Args:
        sampled: the step's scored groups.
        step: 0-based.
        groups: how many to follow.
        unused: why a sample with a score may be in no update.
    """

    sampled: Sampled
    step: int
    groups: int
    unused: str = "group without signal"
    _followed: dict[str, int] = field(default_factory=dict)  # its place among the step's trajectories
    _consumed: dict[str, tuple[str, TokenBatch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = sum(len(group) for group in self.sampled.rollouts.groups[: self.groups])
        self._followed = {name: place for place, name in enumerate(self.sampled.ids(self.step)[:count])}

    def wants(self, batch: TokenBatch) -> bool:
        """Whether a mini-batch holds a sample that is followed."""
        return bool(self._followed) and not self._followed.keys().isdisjoint(batch.sample_ids)

    def consumed(self, batch: TokenBatch | None, part: int) -> None:
        """Note the mini-batch as the update found it; the first update of a sample counts."""
        if batch is None:
            return
        for place, name in enumerate(batch.sample_ids):
            if name in self._followed and name not in self._consumed:
                self._consumed[name] = (f"update {self.step}, mini-batch {part}", batch.select([place]))

    def report(self, trace: Trace, scorer: Scorer, *, clip_low: float, clip_high: float) -> None:
        """Say what became of every sample that is followed."""
        for fact in self._samples(scorer, clip_low, clip_high):
            trace.sink(fact)

    def _samples(self, scorer: Scorer, clip_low: float, clip_high: float) -> Iterator[Sample]:
        prompts, trajectories = self.sampled.prompt_of, self.sampled.trajectories
        for name, place in self._followed.items():
            prompt, trajectory, score = prompts[place], trajectories[place], self.sampled.scores[place]
            known = Sample(
                id=name,
                step=self.step,
                prompt=prompt.text,
                response=scorer.text(trajectory),
                prompt_tokens=trajectory.prompt.tolist(),
                tokens=trajectory.response.tolist(),
                behaviour_logprobs=_rounded(trajectory.logprobs.tolist()),
                truncated=trajectory.truncated,
                versions=trajectory.versions,
                reward=score.score,
                fate=f"dropped: no score{score.message and ': ' + score.message}"
                if score.score is None
                else f"dropped: {self.unused}",
                components=score.components,
                status=score.status,
            )
            yield self._with_update(known, name, clip_low, clip_high) if name in self._consumed else known

    def _with_update(self, known: Sample, name: str, clip_low: float, clip_high: float) -> Sample:
        fate, document = self._consumed[name]
        columns, mask = document.token_columns, document.response_mask
        advantages, behaviour = document.column("advantages"), document.column("behaviour_logprobs")
        current = document.column("proximal_logprobs")
        clipped = is_clipped(current, behaviour, advantages, mask, clip_low=clip_low, clip_high=clip_high)
        return replace(
            known,
            fate=fate,
            advantages=_column(advantages, mask),
            logprobs=_column(current, mask),
            ratios=_column((current - behaviour).exp(), mask),
            clipped=[bool(c) for c in clipped[mask].tolist()],
            reference_logprobs=_column(columns.get("reference_logprobs"), mask),
            values=_column(columns.get("values"), mask),
            returns=_column(columns.get("returns"), mask),
        )


def _column(values: Tensor | None, mask: Tensor) -> Sequence[float]:
    return () if values is None else _rounded(values[mask].to(torch.float64).tolist())


def _rounded(values: Sequence[float]) -> list[float]:
    """Seven digits: what float32 holds."""
    return [float(f"{value:.7g}") for value in values]
