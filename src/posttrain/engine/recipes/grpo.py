"""GRPO: sample a group of responses per prompt, score them, push the policy towards those better than their group.

::

    prompts ─▶ trajectories ─▶ rewards ─▶ advantages ─▶ update ─▶ weights (what the next rollout samples with)

The policy that samples is the policy that is trained, so the recorded log-probabilities are the "old" ones of the PPO
ratio, for every mini-batch of the step; no further importance weight exists. Source: DeepSeekMath, arXiv 2402.03300;
clip-higher and training only on groups with signal: DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from posttrain.domain.seeds import derive_seed
from posttrain.engine.algorithms.advantages import ESTIMATORS, has_signal
from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import GRPOConfig
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.recipes.roles import Roles
from posttrain.engine.recipes.sampling import (
    Probe,
    ProbeSchedule,
    Prompt,
    Sampled,
    Scorer,
    mini_batches,
    rollout_metrics,
    sample_groups,
    score_groups,
)
from posttrain.engine.recipes.witness import Witness
from posttrain.engine.roles.policy import PolicyWorker
from posttrain.engine.roles.reference import ReferenceWorker
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.weights.view import PolicyVersion

_LEARNED = ("loss", "grad_norm", "learning_rate", "clip_fraction", "mismatch_kl")


class GRPO:
    """The recipe over roles.

    Args:
        config: the stage's parameters.
        roles: policy, rollout, and with a KL penalty the reference.
        prompts: every row of the data set.
        scorer: the reward.
        seed: the stage's seed.
        probe: the held-out measurement, if there is one.
    """

    phase = "grpo"

    def __init__(
        self,
        config: GRPOConfig,
        roles: Roles,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        seed: int,
        probe: Probe | None = None,
    ) -> None:
        self.steps = config.steps
        self.roles = roles
        self.journal = Journal(len(prompts), seed)
        self._config, self._seed = config, seed
        self._prompts, self._scorer = prompts, scorer
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)

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
            sampled = self._sample(step)
            span |= {"trajectories": len(sampled.trajectories), "tokens": sampled.rollouts.tokens}
        with trace.span("reward"):
            sampled = score_groups(sampled, self._scorer)
        with trace.span("advantage") as span:
            signal = has_signal(sampled.rewards)
            batch = self._trainable(sampled, signal, step)
            span |= {"groups": len(sampled.prompts), "trained": int(signal.sum())}
        if batch is not None and self.roles.reference:
            with trace.span("reference"):
                batch = self.roles.reference.map(ReferenceWorker.logprobs, batch)
            self.roles.rest()
        witness = Witness(sampled, step, self._config.trace.followed(len(sampled.prompts)))
        with trace.span("update"):
            learned = self._update(batch, step, witness)
        witness.report(trace, self._scorer, clip_low=self._config.clip_low, clip_high=self._config.clip_high)
        trained = sum(batch.lengths) if batch else 0  # every document is in exactly one mini-batch
        return StepReport(sampled.tokens + trained, {**rollout_metrics(sampled, signal), **learned})

    def serve(self, version: PolicyVersion) -> None:
        """The rollout samples with the weights of the last update."""
        self.roles.publish(version)

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Greedy held-out accuracy before the first step, every N steps, and at the end."""
        return self._probe.measure(step, trace, self.roles.rollout)

    def probe_price(self, step: int) -> int:
        """The probe's limit where one is due."""
        return self._probe.price(step)

    def _sample(self, step: int) -> Sampled:
        c = self._config
        seed = derive_seed(self._seed, "grpo", "rollout", step)
        sampling = SamplingParams(max_new_tokens=c.max_new_tokens, temperature=c.temperature, seed=seed)
        return sample_groups(
            self.roles.rollout,
            self.journal,
            self._prompts,
            count=c.prompts_per_step,
            samples=c.group_size,
            sampling=sampling,
        )

    def _trainable(self, sampled: Sampled, signal: Tensor, step: int) -> TokenBatch | None:
        """Scored members of groups with signal, with their advantages; None when no group has any."""
        rewards = sampled.rewards
        advantages = ESTIMATORS[self._config.advantage](rewards)
        keep = (signal[:, None] & ~rewards.isnan()).flatten().nonzero().flatten()
        if not len(keep):
            return None
        every = sampled.trajectories
        kept = [every[i] for i in keep.tolist()]
        batch = TokenBatch.pack(
            [t.document for t in kept],
            provenance=replace(sampled.rollouts.provenance, step=step),
            sample_ids=[sampled.sample_id(step, t) for t in kept],
        )
        return batch.with_advantages(advantages.flatten()[keep])

    def _update(self, batch: TokenBatch | None, step: int, witness: Witness) -> dict[str, float]:
        """One optimiser step per mini-batch; a step without signal changes nothing."""
        c = self._config
        names = (*_LEARNED, *(["kl"] if c.kl else []))
        if batch is None:
            return dict.fromkeys(names, 0.0)
        reports = []
        seed = derive_seed(self._seed, "grpo", "mini_batches", step)
        for part, documents in enumerate(mini_batches(len(batch), c.mini_batches, seed)):
            mini = batch if len(documents) == len(batch) else batch.select(documents)
            update = self.roles.policy.map(
                PolicyWorker.update, mini, self._objective(mini), step=step, part=part, record=witness.wants(mini)
            )
            witness.consumed(update.batch, part)
            reports.append(update.metrics)
        return {name: sum(report[name] for report in reports) / len(reports) for name in names}

    def _objective(self, mini: TokenBatch) -> PolicyObjective:
        c = self._config
        return PolicyObjective(
            Totals.of(mini),
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            aggregation=c.aggregation,
            norm=c.max_new_tokens,
            kl=KLTerm(c.kl.coefficient, c.kl.estimator) if c.kl else None,
        )
