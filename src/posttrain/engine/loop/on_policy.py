"""The stage of an algorithm that learns from its own policy's responses, and the metrics of a step's samples.

The policy samples in the same step or some steps ahead:

::

    prompts ─▶ samples ─▶ scores ─▶ kept groups ─▶ buffer ─▶ documents ─▶ columns ─▶ credit ─▶ updates ─▶ weights
      ▲                                  │ dropped: another prompt takes its place, where the budget allows
      └──────────────────────────────────┘

With lag 0 the buffer is filled and emptied in one step. With lag k the rollout samples batch t + k while batch t is
trained. Weights are published only when no rollout runs, so all samples of a batch are of one version.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.engine.config import SamplingConfig
from posttrain.engine.evaluation.evaluate import Probe, ProbeSchedule
from posttrain.engine.loop.pipeline import Collector, Form
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.recipe import Journal, Reserve, free
from posttrain.engine.loop.updates import Learning
from posttrain.engine.recipes.algorithm import PROXIMAL, RolloutAlgorithm, ScoredGroup, with_temperature
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import Environment, Scorer
from posttrain.engine.trace import SampleTracer, StepReport, Trace, TraceBudget
from posttrain.engine.weights.probe import Attested, challenge_of
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.pacing.admission import AdmissionPolicy, Buffer, InOrder
from posttrain.sandbox.port import Score

_NAMED = re.compile(r"[\w.+-][\w.+ /-]{0,63}", re.ASCII)  # a component name that may be part of a metric name


def rollout_metrics(groups: Sequence[ScoredGroup], *, judged: bool = True) -> dict[str, float]:
    """Return means over the step. `entropy` is the sampled estimate −E[log μ] per token, at the sampling temperature.

    `reward/stderr` is the standard error of `reward/mean`.

    Args:
        judged: whether there are scores; without scores no reward is reported.
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
    """Return the rollout engine's metrics, if the engine counts them.

    The metrics are the mean number of rows decoded together, preemptions, tokens recomputed after preemptions, and
    tokens of prompts.
    """
    named = ("preemptions", "recomputed_tokens", "prefilled_tokens")
    steps, decoded = counts.get("steps", 0), counts.get("decoded_tokens")
    rows = {"rollout/rows": decoded / steps} if steps and decoded is not None else {}
    return {**rows, **{f"rollout/{name}": float(counts[name]) for name in named if name in counts}}


def turn_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean number of responses per sample, and the share of samples whose environment failed."""
    answers = [answer for group in groups for answer in group.answers]
    return {
        "turns/mean": sum(len(answer.turns) for answer in answers) / len(answers),
        "turns/errors": sum(answer.status == "error" for answer in answers) / len(answers),
    }


def _component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return `reward/NAME/mean` and `reward/NAME/std` of each component over the completions that have the component.

    With weighted rewards, the result also contains the share of completions for which each reward failed.
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
    """Return the standard error of a step's mean reward over the drawn prompts: deviation of group means / √groups.

    Samples of one prompt are correlated, so they do not count as independent samples.
    """
    scored = [rewards[~np.isnan(rewards)] for rewards in (group.rewards for group in groups)]
    means = np.array([rewards.mean() for rewards in scored if len(rewards)])
    return {"reward/stderr": float(means.std(ddof=1) / len(means) ** 0.5)} if len(means) > 1 else {}


class OnPolicy:
    """The recipe around an algorithm that samples.

    Args:
        config: the stage's parameters.
        algorithm: decides sampling, filtering, credit and objectives.
        roles: the roles that sample, learn, and fill columns.
        prompts: every row of the data set.
        scorer: scores responses; None: no scores.
        seed: the stage's seed.
        probe: the held-out measurement; None: no probe.
        phase: the phase in reports of progress.
        text: returns the text of a response for traces; by default the text that the scorer reads.
        environment: returns the observation between two responses, if a sample has several responses.
        admission: decides which prompts may be sampled when; by default batch after batch, with the stage's exact lag.

    Raises:
        InputError: the algorithm needs a role or an environment that does not exist.
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
        text: Callable[[Trajectory], str] | None = None,
        environment: Environment | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.phase, self.steps, self.roles = phase, config.steps, roles
        self.journal = Journal(len(prompts), seed)
        roles.prober.texts = challenge_of(prompt.tokens for prompt in prompts)
        self._algorithm, self._prompts, self._scorer, self._seed = algorithm, prompts, scorer, seed
        self._text = text
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)
        roles.rest()
        self._trace = config.trace
        self._budget = TraceBudget(self._trace.bytes, config.steps)
        self._most, lag, streams = config.step_tokens, config.lagging, config.streams
        followed = self._trace.followed(algorithm.source.prompts) * algorithm.source.samples
        self._learning = Learning(
            algorithm, roles, config.steps, seed, lag=lag, streams=streams, followed=followed, meanwhile=self._look
        )
        if lag and roles.sampler.one(RolloutWorker.view) == "alias":
            raise InputError(
                f"lag {lag} needs a rollout with its own weights, got a rollout that reads the policy's weights"
            )
        if config.correction and PROXIMAL not in algorithm.requires(config.steps - 1):
            raise InputError(
                f"{type(algorithm).__name__} must require {PROXIMAL.name} for the correction {config.correction}, but "
                "does not; use correction: bypass, or add the column to requires()"
            )
        policy = admission or InOrder(lag)
        if policy.lag != lag:
            raise InputError(f"{type(policy).__name__} must keep the lag of its stage ({lag}), got {policy.lag}")
        source = algorithm.source
        buffer: Buffer[ScoredGroup] = Buffer(policy, source.prompts, config.steps, source.refills)
        if source.turns > 1 and environment is None:
            raise InputError(
                f"{type(algorithm).__name__} samples {source.turns} turns, for which the stage needs an environment; "
                "set one"
            )
        words = algorithm, roles, prompts, scorer, seed, self.journal, buffer, environment
        self._ahead = Collector(*words, kept=self._offer, watch=self._watch)

    def max_tokens(self, step: int) -> int:
        """Return the maximum number of tokens that the step may still spend.

        The sum consists of every prompt to sample (once), every response (at the token limit), and the tokens that the
        step trains on (once per pass). Replacements of dropped groups are not included; they are reserved when needed.
        """
        if self._most:
            return self._most
        rows = self.journal.peek(self._ahead.missing(step))
        return sum(map(self._ahead.price, rows)) + self._training(step)

    def step(self, step: int, trace: Trace, reserve: Reserve = free) -> StepReport:
        """Train on the groups of the step, while the rollout samples further groups.

        Raises:
            InputError: the step spent more tokens than its declared maximum.
            BudgetExceededError: dropped groups cannot be replaced.
        """
        ahead = self._ahead
        ahead.mark()

        def asked(spent: int, more: int, refuse: bool) -> bool:
            return reserve(spent, more + self._training(step), refuse=refuse)

        groups = ahead.collected(step, trace, asked)
        dropped = ahead.dropped.pop(step, [])
        every = [*groups, *(group for group, _ in dropped)]
        tracer = self._tracer(every, {group.group.key: why for group, why in dropped}, step)
        with trace.span("form") as span:
            form = self._form(step)
            batch = form(groups)
            span |= {"groups": len(groups), "dropped": len(dropped), "documents": len(batch) if batch else 0}
        by_group = form if self._algorithm.groupwise else None
        learned = self._learning.learn(batch, step, trace, tracer, groups, by_group)
        left = tracer.report(trace, self._text or (self._scorer.text if self._scorer else lambda answer: ""))
        ahead.finish(step, trace, lambda spent, more, _: reserve(spent + learned.tokens, more, refuse=False))
        tokens = ahead.spent + learned.tokens
        if self._most is not None and tokens > self._most:
            raise InputError(
                f"{self.phase} spent {tokens} tokens in step {step}, but declared at most {self._most}; "
                "raise tokens_per_step"
            )
        source = self._algorithm.source
        drops = {"groups/dropped": len(dropped) / len(every)} if source.refills else {}
        drops |= turn_metrics(every) if source.turns > 1 else {}
        metrics = {
            **rollout_metrics(every, judged=self._scorer is not None),
            **self._algorithm.report(every),
            **drops,
            "updates": float(learned.updates),
            **learned.metrics,
        }
        return StepReport(
            tokens, metrics, engine_metrics(ahead.counts) | ({"trace/dropped": float(left)} if left else {})
        )

    def publish_weights(self, version: PolicyVersion) -> Attested:
        """Publish the weights of the last update to the rollout, which must not be sampling."""
        self._ahead.version = version.step
        return self.roles.publish(version)

    def rewind(self) -> None:
        """Drop the step's samples; a resumed job samples them again."""
        self._learning.forget()
        self._ahead.rewind()

    def save(self, path: Path) -> Mapping[str, str]:
        """Write the sampled groups that wait for training."""
        return self._ahead.save(path)

    def restore(self, path: Path) -> None:
        """Restore the waiting groups."""
        self._ahead.restore(path)

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Measure greedy held-out accuracy before the first step, every N steps, and at the end."""
        return self._probe.measure(step, trace, self.roles.sampler)

    def probe_max_tokens(self, step: int) -> int:
        """Return the maximum number of tokens of the probe if it is due, else 0."""
        return self._probe.max_tokens(step)

    def _form(self, step: int) -> Form:
        form = partial(self._algorithm.form, seed=derive_seed(self._seed, "form", step))
        return lambda groups: with_temperature(form(groups), groups)

    def _offer(self, group: ScoredGroup) -> None:
        """Request columns for the stretch that a kept group completes, if documents are formed by group."""
        if self._algorithm.groupwise:
            self._learning.columns.offer(group, self._form(group.step))

    def _watch(self, step: int) -> bool:
        """Sum the gradients of complete stretches that have columns; return whether predictions are in progress."""
        return bool(self._learning.gradients and self._learning.gradients.offer(step))

    def _look(self, trace: Trace, seconds: float) -> bool:
        """Take groups of later steps that have been sampled."""
        return self._ahead.look(trace, seconds)

    def _training(self, step: int) -> int:
        """Return the maximum tokens that a step trains on: waiting groups, and missing groups at the token limit."""
        source, waiting = self._algorithm.source, self._ahead.waiting(step)
        rows = self.journal.peek(self._ahead.lacking(step))
        there = sum(len(answer) for group in waiting for answer in group.answers)
        trained = source.samples if source.trained is None else source.trained
        lacking = sum(trained * source.document(len(self._prompts[row].tokens)) for row in rows)
        return self._learning.max_tokens(step, there + lacking)

    def _tracer(self, groups: Sequence[ScoredGroup], dropped: dict[int, str], step: int) -> SampleTracer:
        followed = groups[: self._trace.followed(len(groups))]
        clip = next((update.clip for update in self._algorithm.updates(step) if update.clip), None)
        return SampleTracer(followed, step, self._budget, self._algorithm.unused(step), clip, dropped)
