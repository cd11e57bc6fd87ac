"""GRPO: sample a group of responses per prompt, score them, push the policy towards those better than their group.

::

    prompts ─▶ trajectories ─▶ rewards ─▶ advantages ─▶ update ─▶ weights (what the next rollout samples with)

The policy that samples is the policy that is trained, so the recorded log-probabilities are the "old" ones of the PPO
ratio, for every mini-batch of the step; no further importance weight exists. Source: DeepSeekMath, arXiv 2402.03300;
clip-higher and training only on groups with signal: DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from posttrain.domain.seeds import derive_seed
from posttrain.engine.algorithms.advantages import ESTIMATORS, has_signal
from posttrain.engine.algorithms.aggregation import Totals, token_weights
from posttrain.engine.algorithms.losses import is_clipped, kl_penalty, ppo_clip
from posttrain.engine.batch import Document, Provenance, TokenBatch, Trajectory
from posttrain.engine.config import GRPOConfig
from posttrain.engine.journal import Journal
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.roles.policy import LossFunction, LossParts, Policy
from posttrain.engine.roles.reference import Reference
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row, ready to sample from: `Prompt(tokens=(1, 5, 9), text="user: Q: sort 31", row={"answer": "13", …})`."""

    tokens: Sequence[int]
    text: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores responses; None where there is no score. Wraps a reward function and the tokenizer."""

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Sequence[float | None]:
        """One score per trajectory; `prompts` is parallel to it."""


class Probe(Protocol):
    """A held-out measurement of the policy during training."""

    price: int  # tokens it may spend at the most

    def __call__(self, rollout: RolloutEngine) -> StepReport:
        """Measure; spends at most `price` tokens."""


class GRPO:
    """The recipe over roles.

    Args:
        config: the stage's parameters.
        model: what to train, in place.
        rollout: samples from the very same weights.
        prompts: every row of the data set.
        scorer: the reward.
        seed: the stage's seed.
        probe: the held-out measurement, if there is one.
    """

    phase = "grpo"

    def __init__(
        self,
        config: GRPOConfig,
        model: LanguageModel,
        rollout: RolloutEngine,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        seed: int,
        probe: Probe | None = None,
    ) -> None:
        self.steps = config.steps
        self.reference = Reference(model, config.temperature) if config.kl else None
        self.policy = Policy(
            model,
            config.optimizer,
            config.runtime,
            steps=config.steps,
            seed=seed,
            temperature=config.temperature,
        )
        self.journal = Journal(len(prompts), seed)
        self._config, self._seed = config, seed
        self._rollout, self._prompts, self._scorer, self._probe = rollout, prompts, scorer, probe

    def price(self, step: int) -> int:
        """Every prompt read once, every response at the token limit, and all of it trained on."""
        c = self._config
        prompts = sum(len(self._prompts[row].tokens) for row in self.journal.peek(c.prompts_per_step))
        generated = c.prompts_per_step * c.group_size * c.max_new_tokens
        trained = c.group_size * prompts + generated
        return prompts + generated + trained

    def step(self, step: int, trace: Trace) -> StepReport:
        """prompts → trajectories → rewards → advantages → update."""
        with trace.span("rollout") as span:
            prompts, trajectories = self._sample(step)
            generated = sum(len(t.tokens) for t in trajectories)
            span |= {"trajectories": len(trajectories), "tokens": generated}
        with trace.span("reward"):
            rewards = self._score(prompts, trajectories)
        with trace.span("advantage") as span:
            signal = has_signal(rewards)
            batch = self._trainable(trajectories, rewards, signal, step)
            span |= {"groups": len(prompts), "trained": int(signal.sum())}
        with trace.span("update"):
            learned = self._update(batch, step)
        trained = sum(batch.lengths) if batch else 0  # every document is in exactly one mini-batch
        tokens = sum(len(p.tokens) for p in prompts) + generated + trained
        return StepReport(tokens, {**_rollout_metrics(trajectories, rewards, signal), **learned})

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Greedy held-out accuracy before the first step, every N steps, and at the end."""
        if not (self._probe and self._probe_due(step)):
            return None
        with trace.span("probe"):
            return self._probe(self._rollout)

    def probe_price(self, step: int) -> int:
        """The probe's limit where one is due."""
        return self._probe.price if self._probe and self._probe_due(step) else 0

    def _probe_due(self, step: int) -> bool:
        c = self._config.probe
        return c is not None and (step % c.every == 0 or step == self.steps)

    def _sample(self, step: int) -> tuple[list[Prompt], list[Trajectory]]:
        c = self._config
        taken = self.journal.take(c.prompts_per_step)
        prompts = [self._prompts[row] for _, row in taken]
        sampling = SamplingParams(
            max_new_tokens=c.max_new_tokens,
            temperature=c.temperature,
            seed=derive_seed(self._seed, "grpo", "rollout", step),
        )
        keys = [position for position, _ in taken]
        return prompts, self._rollout.generate(
            [p.tokens for p in prompts], samples=c.group_size, sampling=sampling, prompt_keys=keys
        )

    def _score(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Tensor:
        """`[prompts, members]` float64, NaN where the reward gave no score."""
        scores = self._scorer([prompts[t.prompt_index] for t in trajectories], trajectories)
        values = [float("nan") if score is None else float(score) for score in scores]
        return torch.tensor(values, dtype=torch.float64).view(len(prompts), self._config.group_size)

    def _trainable(
        self, trajectories: Sequence[Trajectory], rewards: Tensor, signal: Tensor, step: int
    ) -> TokenBatch | None:
        """Scored members of groups with signal, with their advantages; None when no group has any."""
        advantages = ESTIMATORS[self._config.advantage](rewards)
        keep = (signal[:, None] & ~rewards.isnan()).flatten().nonzero().flatten()
        if not len(keep):
            return None
        documents = [Document(t.prompt, t.tokens, t.logprobs) for t in (trajectories[i] for i in keep.tolist())]
        batch = TokenBatch.pack(documents, self.policy.model.device, Provenance(step=step, role="policy"))
        return batch.with_advantages(advantages.flatten()[keep])

    def _update(self, batch: TokenBatch | None, step: int) -> dict[str, float]:
        """One optimiser step per mini-batch; a step without signal changes nothing."""
        names = (
            "loss",
            "grad_norm",
            "learning_rate",
            "clip_fraction",
            "mismatch_kl",
            *(["kl"] if self.reference else []),
        )
        if batch is None:
            return dict.fromkeys(names, 0.0)
        reports = []
        for part, documents in enumerate(self._mini_batches(batch.documents, step)):
            mini = batch if len(documents) == batch.documents else batch.select(documents)
            totals = Totals.of(mini)
            report = self.policy.update(mini, self._loss(totals), step=step, part=part)
            reports.append(
                {k: v / totals.tokens if k in ("clip_fraction", "mismatch_kl", "kl") else v for k, v in report.items()}
            )
        return {name: sum(report[name] for report in reports) / len(reports) for name in names}

    def _mini_batches(self, documents: int, step: int) -> list[list[int]]:
        """A seeded shuffle cut into `mini_batches` parts (fewer when there are fewer documents)."""
        count = min(self._config.mini_batches, documents)
        if count == 1:
            return [list(range(documents))]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "grpo", "mini_batches", step))
        order = torch.randperm(documents, generator=generator).tolist()
        return [order[part::count] for part in range(count)]

    def _loss(self, totals: Totals) -> LossFunction:
        c = self._config

        def loss(micro: TokenBatch, logprobs: Tensor) -> LossParts:
            assert micro.behaviour_logprobs is not None
            assert micro.advantages is not None
            mask, old, advantages = micro.response_mask, micro.behaviour_logprobs, micro.advantages
            weights = token_weights(micro, totals, c.aggregation, norm=c.max_new_tokens)
            tokens = ppo_clip(logprobs, old, advantages, mask, clip_low=c.clip_low, clip_high=c.clip_high)
            clipped = is_clipped(logprobs, old, advantages, mask, clip_low=c.clip_low, clip_high=c.clip_high)
            sums = {
                "clip_fraction": clipped.sum(),
                "mismatch_kl": kl_penalty(old, logprobs.detach(), mask, "k3").sum(),
            }
            if c.kl and self.reference:
                penalty = kl_penalty(logprobs, self.reference.logprobs(micro), mask, c.kl.estimator)
                sums["kl"] = penalty.detach().sum()
                tokens = tokens + c.kl.coefficient * penalty
            return LossParts((weights * tokens).sum(), sums)

        return loss


def _rollout_metrics(trajectories: Sequence[Trajectory], rewards: Tensor, signal: Tensor) -> dict[str, float]:
    """Means over the step. `entropy` is the sampled estimate −E[log μ] per token, at the sampling temperature."""
    scored = rewards[~rewards.isnan()]
    tokens = sum(len(t.tokens) for t in trajectories)
    reward = {"reward/mean": float(scored.mean()), "reward/std": float(scored.std(correction=0))} if len(scored) else {}
    return {
        **reward,
        "reward/unscored": 1.0 - len(scored) / rewards.numel(),
        "groups/zero_std": 1.0 - float(signal.double().mean()),
        "response_tokens/mean": tokens / len(trajectories),
        "truncated": sum(t.truncated for t in trajectories) / len(trajectories),
        "entropy": -sum(sum(t.logprobs) for t in trajectories) / max(tokens, 1),
    }
