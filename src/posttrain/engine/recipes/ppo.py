"""PPO with four roles: a policy and a critic that learn, a frozen reference, and a judge (a reward model or function).

::

    prompts ─▶ trajectories ─▶ scores ─▶ reference, values ─▶ rewards per token ─▶ advantages ─▶ updates ─▶ weights

The score stands at a response's last token; a KL penalty against the reference is in the reward of every token, or in
the loss, never in both. Advantages are generalised (GAE) over the critic's values as the rollout found them. Sources:
PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; its use with a reward model: InstructGPT, arXiv 2203.02155.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from posttrain.domain.errors import InputError
from posttrain.domain.seeds import derive_seed
from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.algorithms.gae import generalized_advantages, whiten
from posttrain.engine.algorithms.kl import kl_estimate, kl_rewards, score_rewards
from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective, ValueObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import PPOConfig
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.recipes.roles import Roles, need_reference
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
from posttrain.engine.roles.frozen import FrozenWorker
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.weights.view import PolicyVersion

_POLICY = ("loss", "grad_norm", "learning_rate", "clip_fraction", "mismatch_kl")
_CRITIC = ("loss", "grad_norm", "clip_fraction")


class PPO:
    """The recipe over roles.

    Args:
        config: the stage's parameters.
        roles: policy, rollout, critic; with a KL penalty the reference; with a reward model that one.
        prompts: every row of the data set.
        scorer: the judge.
        seed: the stage's seed.
        probe: the held-out measurement, if there is one.

    Raises:
        InputError: roles without a critic, or without the reference that a KL penalty needs.
    """

    phase = "ppo"

    def __init__(
        self,
        config: PPOConfig,
        roles: Roles,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        seed: int,
        probe: Probe | None = None,
    ) -> None:
        self.steps = config.steps
        self.roles, self._critic = roles, _needed(roles)
        need_reference(roles, config.kl)
        self.journal = Journal(len(prompts), seed)
        self._config, self._seed = config, seed
        self._prompts, self._scorer = prompts, scorer
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)

    def price(self, step: int) -> int:
        """Every prompt read once, every response at the token limit, all of it trained on `ppo_epochs` times, by the
        policy and by the critic.
        """
        c = self._config
        prompts = sum(len(self._prompts[row].tokens) for row in self.journal.peek(c.prompts_per_step))
        generated = c.prompts_per_step * c.group_size * c.max_new_tokens
        return prompts + generated + 2 * c.ppo_epochs * (c.group_size * prompts + generated)

    def step(self, step: int, trace: Trace) -> StepReport:
        """prompts → trajectories → scores → values → advantages → updates."""
        with trace.span("rollout") as span:
            sampled = self._sample(step)
            span |= {"trajectories": len(sampled.trajectories), "tokens": sampled.rollouts.tokens}
        with trace.span("reward"):
            sampled = score_groups(sampled, self._scorer)
        signal = torch.ones(len(sampled.prompts), dtype=torch.bool)
        batch = self._scored(sampled, step)
        c = self._config
        witness = Witness(sampled, step, c.trace.followed(len(sampled.prompts)), unused="critic warm-up")
        if batch is None:
            witness.report(trace, self._scorer, clip_low=c.clip_low, clip_high=c.clip_high)
            return StepReport(sampled.tokens, rollout_metrics(sampled, ~signal))
        batch, penalty = self._estimated(batch, sampled, trace)
        self.roles.rest()
        with trace.span("update"):
            learned, trained = self._update(batch, step, witness)
        witness.report(trace, self._scorer, clip_low=c.clip_low, clip_high=c.clip_high)
        return StepReport(sampled.tokens + trained, {**rollout_metrics(sampled, signal), **learned, **penalty})

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
        seed = derive_seed(self._seed, "ppo", "rollout", step)
        sampling = SamplingParams(max_new_tokens=c.max_new_tokens, temperature=c.temperature, seed=seed)
        return sample_groups(
            self.roles.rollout,
            self.journal,
            self._prompts,
            count=c.prompts_per_step,
            samples=c.group_size,
            sampling=sampling,
        )

    def _scored(self, sampled: Sampled, step: int) -> TokenBatch | None:
        """Every trajectory that has a score; None when none has."""
        every, ids = sampled.trajectories, sampled.ids(step)
        kept = [i for i, score in enumerate(sampled.scores) if score.score is not None]
        if not kept:
            return None
        return TokenBatch.pack(
            [every[i].document for i in kept],
            provenance=replace(sampled.rollouts.provenance, step=step),
            sample_ids=[ids[i] for i in kept],
        )

    def _estimated(self, batch: TokenBatch, sampled: Sampled, trace: Trace) -> tuple[TokenBatch, dict[str, float]]:
        """Reference and values (side by side where they have devices of their own), rewards, returns, advantages; and
        how far the policy that sampled is from the reference.
        """
        c, reference = self._config, self.roles.reference
        with trace.span("values"):
            values = self._critic.nonblocking.map(TrainWorker.fill, batch, "values", "values")
            known = reference.map(FrozenWorker.fill, batch, "reference_logprobs", "logprobs") if reference else batch
            valued = values.result().column("values")
        with trace.span("advantage"):
            scores = torch.tensor([s.score for s in sampled.scores if s.score is not None])
            mask, old = batch.response_mask, batch.column("behaviour_logprobs")
            rewards, report = score_rewards(scores, mask, batch.lengths), {}
            if c.kl:
                anchor = known.column("reference_logprobs")
                kind = c.kl.estimator.removesuffix("-corrected")  # which corrects the gradient
                distance = kl_estimate(old, anchor, mask, kind)
                report["kl"] = float(distance.sum()) / max(int(mask.sum()), 1)
                if c.kl.place == "reward":
                    weight = c.kl.coefficient
                    rewards = kl_rewards(old, anchor, mask, scores, batch.lengths, coefficient=weight, estimator=kind)
            advantages, returns = generalized_advantages(rewards, valued, mask, batch.lengths, c.gae.gamma, c.gae.lam)
            if c.gae.whiten:
                advantages = whiten(advantages, mask)
        return known.with_columns(values=valued, rewards=rewards, returns=returns, advantages=advantages), report

    def _update(self, batch: TokenBatch, step: int, witness: Witness) -> tuple[dict[str, float], int]:
        """Critic and policy on every mini-batch of every epoch; the metrics' means, and the tokens trained on."""
        c = self._config
        reports: list[dict[str, float]] = []
        trained, part = 0, 0
        for epoch in range(c.ppo_epochs):
            seed = derive_seed(self._seed, "ppo", "mini_batches", step, epoch)
            for documents in mini_batches(len(batch), c.mini_batches, seed):
                mini = batch if len(documents) == len(batch) else batch.select(documents)
                totals, size = Totals.of(mini), sum(mini.lengths)
                valuing = self._critic.nonblocking.map(
                    TrainWorker.update, mini, ValueObjective(totals, c.critic.clip), step=step, part=part
                )
                report = dict.fromkeys(_POLICY, 0.0)
                if step >= c.critic.warmup:
                    update = self.roles.policy.map(
                        TrainWorker.update,
                        mini,
                        self._objective(totals),
                        step=step,
                        part=part,
                        record=witness.wants(mini),
                    )
                    witness.consumed(update.batch, part)
                    report |= update.metrics
                    trained += size
                reports.append(report | {f"critic/{name}": valuing.result().metrics[name] for name in _CRITIC})
                trained += size
                part += 1
        return {name: sum(r[name] for r in reports) / len(reports) for name in reports[0]}, trained

    def _objective(self, totals: Totals) -> PolicyObjective:
        c = self._config
        in_loss = c.kl is not None and c.kl.place == "loss"
        return PolicyObjective(
            totals,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            kl=KLTerm(c.kl.coefficient, c.kl.estimator) if c.kl and in_loss else None,
        )


def _needed(roles: Roles) -> WorkerGroup[TrainWorker]:
    if roles.critic is None:
        raise InputError("PPO needs a critic, got roles without one; open them with a critic")
    return roles.critic
