"""GRPO: sample a group of responses per prompt, score them, push the policy towards those better than their group.

::

    prompts ─▶ trajectories ─▶ rewards ─▶ advantages ─▶ update ─▶ weights (what the next rollout samples with)

The policy that samples is the policy that is trained, so the recorded log-probabilities are the "old" ones of the PPO
ratio, for every mini-batch of the step; no further importance weight exists. Responses without advantage (their group
has no signal, or they have no score) have no policy gradient and are not computed; the loss is divided by all that was
sampled all the same, so that leaving them out changes nothing. Source: DeepSeekMath, arXiv 2402.03300; clip-higher:
DAPO, arXiv 2503.14476.
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

    Raises:
        InputError: roles without the reference that a KL penalty needs.
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
        need_reference(roles, config.kl)
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
            members = self._members(sampled.rewards, signal)
            batch = self._trainable(sampled, members, step)
            span |= {"groups": len(sampled.prompts), "trained": int(signal.sum())}
        if batch is not None and self.roles.reference:
            with trace.span("reference"):
                batch = self.roles.reference.map(FrozenWorker.fill, batch, "reference_logprobs", "logprobs")
            self.roles.rest()
        witness = Witness(sampled, step, self._config.trace.followed(len(sampled.prompts)))
        with trace.span("update"):
            learned = self._update(batch, self._parts(sampled, members, step), step, witness)
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

    def _members(self, rewards: Tensor, signal: Tensor) -> list[int]:
        """Which trajectories have a gradient: those with an advantage; with a KL term all, since it reads no reward."""
        with_advantage = signal[:, None] & ~rewards.isnan()
        if self._config.kl and self._config.denominator == "sampled":
            return list(range(rewards.numel()))
        members: list[int] = with_advantage.flatten().nonzero().flatten().tolist()
        return members

    def _trainable(self, sampled: Sampled, members: Sequence[int], step: int) -> TokenBatch | None:
        """These trajectories with their advantages; None when there are none."""
        if not members:
            return None
        advantages = ESTIMATORS[self._config.advantage](sampled.rewards)
        every, ids = sampled.trajectories, sampled.ids(step)
        batch = TokenBatch.pack(
            [every[i].document for i in members],
            provenance=replace(sampled.rollouts.provenance, step=step),
            sample_ids=[ids[i] for i in members],
        )
        return batch.with_columns(advantages=batch.spread(advantages.flatten()[list(members)]))

    def _parts(self, sampled: Sampled, members: Sequence[int], step: int) -> list[tuple[Totals, list[int]]]:
        """What every mini-batch is divided by, and its documents of the batch of `members`."""
        c, seed = self._config, derive_seed(self._seed, "grpo", "mini_batches", step)
        lengths = [trajectory.generated for trajectory in sampled.trajectories]
        counted = range(len(lengths)) if c.denominator == "sampled" else members
        places = {member: place for place, member in enumerate(members)}
        parts = []
        for chosen in mini_batches(len(counted), c.mini_batches, seed):
            drawn = [counted[i] for i in chosen]
            totals = Totals.of_lengths(lengths[i] for i in drawn)
            parts.append((totals, [places[i] for i in drawn if i in places]))
        return parts

    def _update(
        self, batch: TokenBatch | None, parts: Sequence[tuple[Totals, list[int]]], step: int, witness: Witness
    ) -> dict[str, float]:
        """One optimiser step per mini-batch that has a gradient; a step without any changes nothing."""
        names = (*_LEARNED, *(["kl"] if self._config.kl else []))
        if batch is None:
            return dict.fromkeys(names, 0.0)
        reports = []
        for part, (totals, documents) in enumerate(parts):
            if not documents:
                continue
            mini = batch if len(documents) == len(batch) else batch.select(documents)
            objective = self._objective(totals, Totals.of(mini).tokens)
            update = self.roles.policy.map(
                TrainWorker.update, mini, objective, step=step, part=part, record=witness.wants(mini)
            )
            witness.consumed(update.batch, part)
            reports.append(update.metrics)
        return {name: sum(report[name] for report in reports) / len(reports) for name in names}

    def _objective(self, totals: Totals, measured: int) -> PolicyObjective:
        c = self._config
        return PolicyObjective(
            totals,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            aggregation=c.aggregation,
            norm=c.max_new_tokens,
            kl=KLTerm(c.kl.coefficient, c.kl.estimator) if c.kl else None,
            measured=measured,
        )
