"""What on-policy recipes share: prompts in, groups of scored trajectories out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.rewards.port import Score
from posttrain.engine.rollout.batches import PromptBatch, Rollouts
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Trajectory
from posttrain.engine.settings import LossProbeConfig

_NAMED = re.compile(r"[\w.+-][\w.+ /-]{0,63}", re.ASCII)  # a component whose name may be part of a metric's


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row, ready to sample from: `Prompt(tokens=(1, 5, 9), text="user: Q: sort 31", row={"answer": "13", …})`."""

    tokens: Sequence[int]
    text: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores responses. Wraps a reward function and the tokenizer, or a reward model."""

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One score per trajectory; `prompts` is parallel to it."""

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""


W_contra = TypeVar("W_contra", contravariant=True)
W = TypeVar("W")


class Measurement(Protocol[W_contra]):
    """A held-out measurement during training, through the workers that can make it."""

    price: int  # tokens it may spend at the most

    def __call__(self, workers: W_contra, /) -> StepReport:
        """Measure; spends at most `price` tokens."""


Probe = Measurement[WorkerGroup[RolloutWorker]]


@final
@dataclass(frozen=True, slots=True)
class ProbeSchedule(Generic[W]):
    """When a recipe measures its model: before the first step, every `every` steps, and at the end.

    Args:
        probe: None: never.
        every: steps between measurements.
        last: the number of steps of the stage.
    """

    probe: Measurement[W] | None
    every: int
    last: int

    @classmethod
    def of(cls, probe: Measurement[W] | None, config: LossProbeConfig | None, last: int) -> ProbeSchedule[W]:
        """As the stage's configuration says."""
        return cls(probe, config.every, last) if config else cls(None, 1, last)

    def price(self, step: int) -> int:
        """Tokens it may spend after `step` steps; 0 where none is due."""
        return self.probe.price if self.probe and self._due(step) else 0

    def measure(self, step: int, trace: Trace, workers: W) -> StepReport | None:
        """What the model can after `step` steps, if that is due."""
        if self.probe is None or not self._due(step):
            return None
        with trace.span("probe"):
            return self.probe(workers)

    def _due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last


@final
@dataclass(frozen=True, slots=True)
class Sampled:
    """The scored groups of one step."""

    prompts: tuple[Prompt, ...]
    rollouts: Rollouts
    scores: tuple[Score, ...] = ()  # one per trajectory, prompt by prompt

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All of them, prompt by prompt."""
        return self.rollouts.trajectories

    @property
    def rewards(self) -> Tensor:
        """`[prompts, members]` float64, NaN where there is no score."""
        values = [float("nan") if score.score is None else score.score for score in self.scores]
        return torch.tensor(values, dtype=torch.float64).view(len(self.prompts), -1)

    @property
    def tokens(self) -> int:
        """Read once per prompt, and generated."""
        return sum(len(p.tokens) for p in self.prompts) + self.rollouts.tokens

    @property
    def prompt_of(self) -> list[Prompt]:
        """The prompt of each trajectory."""
        pairs = zip(self.prompts, self.rollouts.groups, strict=True)
        return [prompt for prompt, group in pairs for _ in group.samples]

    def ids(self, step: int) -> list[str]:
        """`<step>.<prompt's position in the data stream>.<sample>` of each trajectory."""
        return [f"{step}.{group.key}.{sample.index}" for group in self.rollouts.groups for sample in group.samples]


def sample_groups(
    rollout: WorkerGroup[RolloutWorker],
    journal: Journal,
    prompts: Sequence[Prompt],
    *,
    count: int,
    samples: int,
    sampling: SamplingParams,
) -> Sampled:
    """Take the next `count` prompts and sample `samples` responses to each."""
    taken = journal.take(count)
    chosen = tuple(prompts[row] for _, row in taken)
    batch = PromptBatch(tuple(tuple(p.tokens) for p in chosen), tuple(position for position, _ in taken))
    rollouts = rollout.map(RolloutWorker.generate, batch, sampling, samples)
    return Sampled(chosen, rollouts)


def score_groups(sampled: Sampled, scorer: Scorer) -> Sampled:
    """Every trajectory with its score."""
    return replace(sampled, scores=tuple(scorer(sampled.prompt_of, sampled.trajectories)))


def rollout_metrics(sampled: Sampled, signal: Tensor) -> dict[str, float]:
    """Means over the step. `entropy` is the sampled estimate −E[log μ] per token, at the sampling temperature.

    `reward/stderr` is the standard error of `reward/mean`.
    """
    trajectories, rewards = sampled.trajectories, sampled.rewards
    scored = rewards[~rewards.isnan()]
    tokens = sampled.rollouts.tokens
    reward = {"reward/mean": float(scored.mean()), "reward/std": float(scored.std(correction=0))} if len(scored) else {}
    return {
        **reward,
        **_standard_error(rewards),
        **_component_metrics(sampled.scores),
        "reward/unscored": 1.0 - len(scored) / rewards.numel(),
        "reward/errors": sum(score.status == "error" for score in sampled.scores) / rewards.numel(),
        "reward/timeouts": sum(score.status == "timeout" for score in sampled.scores) / rewards.numel(),
        "groups/zero_std": 1.0 - float(signal.double().mean()),
        "response_tokens/mean": tokens / len(trajectories),
        "truncated": sum(t.truncated for t in trajectories) / len(trajectories),
        "entropy": -sum(float(t.logprobs.sum(dtype="float64")) for t in trajectories) / max(tokens, 1),
    }


def _component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`reward/NAME/mean` and `/std` of every component over the completions that have it; of rewards with weights also
    the shares that failed.
    """
    found: dict[str, float] = {}
    for name in sorted({name for score in scores for name in score.components if _NAMED.fullmatch(name)}):
        values = torch.tensor([s.components[name] for s in scores if name in s.components], dtype=torch.float64)
        found |= {f"reward/{name}/mean": float(values.mean()), f"reward/{name}/std": float(values.std(correction=0))}
    for name in scores[0].parts if scores else ():
        for word, status in (("errors", "error"), ("timeouts", "timeout")):
            found[f"reward/{name}/{word}"] = sum(s.parts[name].status == status for s in scores) / len(scores)
    return found


def _standard_error(rewards: Tensor) -> dict[str, float]:
    """How far a step's mean reward strays by the prompts it happened to draw: deviation of group means / √groups.

    Samples of one prompt are alike, so they do not count as so many independent ones.
    """
    means = rewards.nanmean(dim=1)
    means = means[~means.isnan()]
    return {"reward/stderr": float(means.std() / len(means) ** 0.5)} if len(means) > 1 else {}


def mini_batches(documents: int, count: int, seed: int) -> list[list[int]]:
    """A seeded shuffle of document numbers cut into `count` parts (fewer when there are fewer documents)."""
    count = min(count, documents)
    if count == 1:
        return [list(range(documents))]
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[part::count] for part in range(count)]
