"""The stage of an algorithm that learns from responses its own policy samples: one step after the other, lag 0.

::

    prompts ─▶ samples ─▶ scores ─▶ kept groups ─▶ documents ─▶ columns ─▶ credit ─▶ updates ─▶ weights
      ▲                                  │ dropped: another prompt takes its place, where the budget allows
      └──────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from posttrain.domain.errors import InputError
from posttrain.domain.seeds import derive_seed
from posttrain.engine.config import DataflowConfig, OnPolicyConfig, SamplingConfig, TraceConfig
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.algorithm import RolloutAlgorithm, ScoredGroup
from posttrain.engine.recipes.learning import Learning
from posttrain.engine.recipes.recipe import Reserve, StepReport, Trace, free
from posttrain.engine.recipes.roles import Roles
from posttrain.engine.recipes.rollout_metrics import rollout_metrics
from posttrain.engine.recipes.sample_tracer import SampleTracer
from posttrain.engine.recipes.sampling import Probe, ProbeSchedule, Prompt, Scorer
from posttrain.engine.rewards.port import Score
from posttrain.engine.rollout.batches import PromptBatch
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.view import PolicyVersion


class OnPolicy:
    """The recipe around an algorithm that samples.

    Args:
        config: the stage's parameters.
        algorithm: what it does.
        roles: who samples, learns, and fills columns.
        prompts: every row of the data set.
        scorer: whoever scores responses; None: nobody does.
        seed: the stage's seed.
        probe: the held-out measurement, if there is one.
        phase: what its progress is called.

    Raises:
        InputError: the algorithm needs a role that is not there.
    """

    def __init__(
        self,
        config: SamplingConfig,
        algorithm: RolloutAlgorithm,
        roles: Roles,
        prompts: Sequence[Prompt],
        scorer: Scorer | None,
        seed: int,
        probe: Probe | None = None,
        *,
        phase: str = "train",
    ) -> None:
        self.phase, self.steps, self.roles = phase, config.steps, roles
        self.journal = Journal(len(prompts), seed)
        self._algorithm, self._prompts, self._scorer, self._seed = algorithm, prompts, scorer, seed
        self._learning = Learning(algorithm, roles, config.steps, seed)
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)
        roles.rest()
        self._trace = config.trace if isinstance(config, OnPolicyConfig) else TraceConfig(groups=0)
        self._most = config.tokens_per_step if isinstance(config, DataflowConfig) else None

    def price(self, step: int) -> int:
        """Every prompt read once, every response at the token limit, all of it trained on as often as it is; nothing of
        what replaces dropped groups, which is reserved when it is needed.
        """
        source = self._algorithm.source
        return self._most or self._worst(step, self.journal.peek(source.prompts))

    def step(self, step: int, trace: Trace, reserve: Reserve = free) -> StepReport:
        """Sample, score, keep or replace, learn.

        Raises:
            InputError: it spent more tokens than a step may.
            BudgetExceededError: dropped groups cannot be replaced.
        """
        groups, dropped = self._collected(step, trace, reserve)
        every = [*groups, *(group for group, _ in dropped)]
        spent = sum(group.tokens for group in every)
        tracer = self._tracer(every, {group.group.key: why for group, why in dropped}, step)
        with trace.span("form") as span:
            batch = self._algorithm.form(groups, derive_seed(self._seed, "form", step))
            span |= {"groups": len(groups), "dropped": len(dropped), "documents": len(batch) if batch else 0}
        learned = self._learning.learn(batch, step, trace, tracer)
        tracer.report(trace, self._scorer)
        tokens = spent + learned.tokens
        if self._most is not None and tokens > self._most:
            raise InputError(
                f"{self.phase} spent {tokens} tokens in step {step}, at most {self._most} were declared; "
                "set tokens_per_step"
            )
        drops = {"groups/dropped": len(dropped) / len(every)} if self._algorithm.source.refills else {}
        metrics = {**rollout_metrics(every), **self._algorithm.report(every), **drops, **learned.metrics}
        return StepReport(tokens, metrics)

    def serve(self, version: PolicyVersion) -> None:
        """The rollout samples with the weights of the last update."""
        self.roles.publish(version)

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Greedy held-out accuracy before the first step, every N steps, and at the end."""
        return self._probe.measure(step, trace, self.roles.sampler)

    def probe_price(self, step: int) -> int:
        """The probe's limit where one is due."""
        return self._probe.price(step)

    def _collected(
        self, step: int, trace: Trace, reserve: Reserve
    ) -> tuple[list[ScoredGroup], list[tuple[ScoredGroup, str]]]:
        """The step's groups in the order of the data stream, and those that were dropped, each with the reason."""
        kept: list[ScoredGroup] = []
        dropped: list[tuple[ScoredGroup, str]] = []
        for turn in range(self._algorithm.source.refills + 1):
            missing = self._algorithm.source.prompts - len(kept)
            if not missing:
                break
            if turn:
                spent = sum(group.tokens for group in [*kept, *(group for group, _ in dropped)])
                reserve(spent, self._worst(step, self.journal.peek(missing), kept))
            for group in self._scored(self._sampled(missing, step, trace), trace):
                verdict = self._algorithm.keep(group)
                if verdict is None:
                    kept.append(group)
                else:
                    dropped.append((group, verdict.reason))
        return kept, dropped

    def _sampled(self, count: int, step: int, trace: Trace) -> list[ScoredGroup]:
        """The next prompts with their responses."""
        source = self._algorithm.source
        with trace.span("rollout") as span:
            taken = self.journal.take(count)
            chosen = [self._prompts[row] for _, row in taken]
            batch = PromptBatch(tuple(tuple(p.tokens) for p in chosen), tuple(position for position, _ in taken))
            sampling = SamplingParams(
                max_new_tokens=source.max_tokens,
                temperature=source.temperature,
                seed=derive_seed(self._seed, "rollout"),  # a position in the stream never repeats
            )
            found = self.roles.sampler.map(RolloutWorker.generate, batch, sampling, source.samples)
            span |= {"trajectories": len(found.trajectories), "tokens": found.tokens}
        none = (Score(None),) * source.samples
        return [ScoredGroup(p, group, none, step) for p, group in zip(chosen, found.groups, strict=True)]

    def _scored(self, groups: Sequence[ScoredGroup], trace: Trace) -> list[ScoredGroup]:
        if self._scorer is None:
            return list(groups)
        with trace.span("reward"):
            prompts = [group.prompt for group in groups for _ in group.scores]
            scores = iter(self._scorer(prompts, [answer for group in groups for answer in group.answers]))
        self.roles.rest()
        return [replace(group, scores=tuple(islice(scores, len(group.scores)))) for group in groups]

    def _worst(self, step: int, rows: Sequence[int], kept: Sequence[ScoredGroup] = ()) -> int:
        """Tokens that so many prompts may cost: read, answered to the limit, trained on with what is kept."""
        source = self._algorithm.source
        read = sum(len(self._prompts[row].tokens) for row in rows)
        generated = len(rows) * source.samples * source.max_tokens
        there = sum(len(answer) for group in kept for answer in group.answers)
        return read + generated + self._learning.price(step, there + source.samples * read + generated)

    def _tracer(self, groups: Sequence[ScoredGroup], dropped: dict[int, str], step: int) -> SampleTracer:
        followed = groups[: self._trace.followed(len(groups))]
        clip = next((update.clip for update in self._algorithm.updates(step) if update.clip), None)
        return SampleTracer(followed, step, self._algorithm.unused(step), clip, dropped)
