"""The loop of every training stage, the stage of algorithms that learn from rows, and selection by probes.

The loop has one thread, which blocks only on its own calls:

::

          ┌──────────────────────────────────── step N ────────────────────────────────────┐
    ──▶ orders? ──▶ probe due? ──▶ can the budget pay? ──▶ recipe.step ──▶ report ──▶ checkpoint due? ──┐
     ▲    │stop: checkpoint, out          │no: checkpoint, fail   prompts ▶ trajectories ▶ rewards      │
     │    │checkpoint: write one, continue                        ▶ advantages ▶ update ▶ weights       │
     └──────────────────────────────────────────────────────────────────────────────────────────────────┘

The loop blocks on the rollout, the reward and the update; each of these calls returns (a reward that hangs is killed at
its deadline). The loop polls orders only between steps, so it obeys a stop within one step. The recipe decides how far
sampling runs ahead, and which weights the rollout reads (`on_policy`).

The effect of a step depends on (seed, N, weights, moments, journal) alone. Checkpoints, probes, orders and facts change
none of these, so their timing cannot change the result, and the results of a resumed job are bit-identical to those of
an uninterrupted job.

`open_learner`, `open_rollout` and the other functions of this form start the roles that a stage needs, in given pools.

`FromRows` is the stage of an algorithm that learns from given rows: demonstrations, preferences, labels.

A stage's probe decides when to stop, and which step was the best. These decisions depend only on the sequence of the
probe's values, and the values depend only on the weights, so a resumed job decides in the same way as an uninterrupted
job. A checkpoint at step N contains the values of the probes before step N; the probe at step N runs again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, final

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import BudgetExceededError, FailureClass, IntegrityError, JobFailedError
from posttrain.domain.jobs import FactSink, Metric, Note, Progress, seconds_short, tokens_short
from posttrain.domain.kinds import UNCHANGED
from posttrain.domain.ports import crashpoint
from posttrain.domain.roles import ROLLOUT, RoleSpec
from posttrain.engine.batch import TokenBatch, peak_memory
from posttrain.engine.config import RowsConfig, SamplingConfig, TrainingConfig
from posttrain.engine.evaluation.evaluate import ProbeSchedule
from posttrain.engine.groups.port import Recorder
from posttrain.engine.groups.worker_group import ResourcePool, WorkerGroup
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.recipe import Journal, Recipe, Reserve, free
from posttrain.engine.loop.updates import Learning
from posttrain.engine.models.files import ModelSource, ScalarSource
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.logprobs import Model
from posttrain.engine.recipes.algorithm import RowAlgorithm
from posttrain.engine.roles.learner import micro_batch_tokens
from posttrain.engine.roles.remote import RemoteSource
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.port import RolloutEngine
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.settings import EarlyStoppingConfig
from posttrain.engine.trace import StepReport, Trace
from posttrain.engine.weights.checkpoint import BestModel, TrainState, begin_checkpoint, commit_checkpoint, read_state
from posttrain.engine.weights.stream import PolicyVersion

CONTROLLER_METRICS = ("tokens_per_second", "memory/peak_resident_mib", "memory/peak_allocated_mib")
R = TypeVar("R")
PoolOf = Callable[[str], ResourcePool]  # role → the pool that runs it
Source = ModelSource | ScalarSource | Model
FrozenSource = Source | RemoteSource


class UnmeasuredError(JobFailedError):
    """A probe returned no finite value to compare."""

    failure_class = FailureClass.DIVERGED


@dataclass(frozen=True, slots=True)
class ProbeState:
    """The state of the probes so far; plain JSON in a checkpoint."""

    best: float | None = None  # the best value; None: not probed yet
    step: int = 0  # the step of the best value; the earliest of several equal values
    counted: float | None = None  # the value that an improvement must exceed by `min_delta`
    missed: int = 0  # probes since the last improvement


@dataclass(slots=True)
class Selection:
    """Selects the best step, and the step at which to stop, by one metric of the probe.

    Args:
        metric: the probe's metric.
        lower: whether smaller values are better.
        stopping: when to stop; None: never.
    """

    metric: str
    lower: bool
    stopping: EarlyStoppingConfig | None = None
    state: ProbeState = field(default_factory=ProbeState)

    @classmethod
    def of(cls, config: TrainingConfig) -> Selection | None:
        """Return the selection that a stage's configuration sets; None: the stage's probe decides nothing."""
        if config.probe is None or not (config.early_stopping or config.keep_best):
            return None
        return cls(config.selects_by, config.lower_is_better, config.early_stopping)

    def see(self, step: int, values: Mapping[str, float]) -> bool:
        """Record the probe after `step` steps; return whether its value is better than every earlier value.

        Raises:
            UnmeasuredError: the value is not finite.
        """
        value, before = values[self.metric], self.state
        if not math.isfinite(value):
            raise UnmeasuredError(f"{self.metric} at step {step} must be finite, got {value}; lower the learning rate")
        better = before.best is None or self._gain(value, before.best) > 0
        least = self.stopping.min_delta if self.stopping else 0.0
        improved = before.counted is None or self._gain(value, before.counted) > least
        now = replace(before, best=value, step=step) if better else before
        self.state = replace(now, counted=value, missed=0) if improved else replace(now, missed=before.missed + 1)
        return better

    @property
    def over(self) -> bool:
        """Whether the stage must stop."""
        return self.stopping is not None and self.state.missed >= self.stopping.patience

    def told(self, step: int, total: int) -> str:
        """Return why a stage ends at `step`, in one sentence."""
        assert self.stopping is not None
        now, least = self.state, self.stopping.min_delta
        better = f"better than {now.counted:.4g}" + (f" by more than {least:g}" if least else "")
        probes = f"{now.missed} probe{'s' if now.missed > 1 else ''}"
        return (
            f"stopped early at step {step} of {total}: {self.metric} was not {better} in {probes}; "
            f"the best was {now.best:.4g} at step {now.step}"
        )

    def metrics(self, stopped_at: int | None = None) -> dict[str, float]:
        """Return the selection's metrics for the stage's result."""
        if self.state.best is None:
            return {}
        found = {"best/step": float(self.state.step), f"best/{self.metric}": self.state.best}
        return found if stopped_at is None else {**found, "stopped_early/step": float(stopped_at)}

    def resume(self, value: Mapping[str, Any] | None) -> Self:
        """Continue from the state in a checkpoint."""
        self.state = ProbeState(**value) if value else ProbeState()
        return self

    def _gain(self, value: float, other: float) -> float:
        return other - value if self.lower else value - other


class Order(Enum):
    """A request from outside, read between two steps."""

    GO_ON = "go on"
    CHECKPOINT = "checkpoint"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a stage, for this attempt and the attempts that it resumes together."""

    tokens: int | None = None
    deadline: float | None = None  # seconds since the epoch
    seconds: float | None = None  # the time limit; this field and the next two are for messages only
    tokens_declared: int | None = None  # the run's whole budget, of which `tokens` were left
    seconds_declared: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a stage's loop: `Outcome(status="succeeded", steps=240, tokens=812000, metrics={…})`."""

    status: str  # succeeded | stopped
    steps: int
    tokens: int
    metrics: dict[str, float]  # the last value of each metric
    message: str = ""  # why the stage ended before its last step, if it did


@dataclass(slots=True)
class Controller:
    """Runs a recipe to its end.

    Args:
        recipe: computes the steps; has the policy and the journal.
        checkpoints: folder for checkpoints.
        fingerprint: digest of the inputs that decide the result; a checkpoint with a different fingerprint is rejected.
        every: steps between checkpoints.
        sink: receives facts.
        flush: makes all earlier facts durable; called before a checkpoint, which must not cover unreported steps.
        orders: polled between steps.
        limits: the limits on tokens and time.
        recorder: records the calls of the worker groups; the controller sets its step.
        meter: receives the tokens spent and, before each step, the maximum tokens that the step may cost.
        selection: decides by the probe's values; None: the probe decides nothing.
        best: keeps the model with the best probe value; None: no model is kept.
    """

    recipe: Recipe
    checkpoints: Path
    fingerprint: str
    every: int
    sink: FactSink
    orders: Callable[[], Order] = lambda: Order.GO_ON
    limits: Limits = Limits()
    flush: Callable[[], None] = lambda: None
    recorder: Recorder = field(default_factory=Recorder)
    meter: Callable[[int, int], None] = lambda spent, reserved: None
    selection: Selection | None = None
    best: BestModel | None = None
    tokens: int = 0  # spent so far, including the tokens of the attempts that this attempt resumes
    _incarnation: int = 0
    _step: int = 0
    _saved: int = -1
    _began: int = 0  # documents read before the step
    _metrics: dict[str, float] = field(default_factory=dict)
    _idle: bool = True  # no step of this attempt, or of the attempts that it resumes, changed weights

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint, which any number of ranks may have written.

        Raises:
            IntegrityError: the checkpoint is incomplete, or is from a stage with different parameters, seed or inputs.
        """
        state = read_state(path)
        if state.fingerprint != self.fingerprint:
            raise IntegrityError(
                f"the checkpoint at step {state.step} is from a different stage ({state.fingerprint[:19]}…; this stage "
                f"is {self.fingerprint[:19]}…); start without a checkpoint"
            )
        self.recipe.roles.restore(path)
        self.recipe.journal.consumed = state.consumed
        self.recipe.restore(path)
        self.tokens, self._step, self._saved = state.tokens, state.step, state.step
        self._metrics, self._incarnation = dict(state.metrics), state.incarnation + 1
        self._idle = not state.updated
        if self.selection:
            self.selection.resume(state.probes)
        if self.best:
            self.best.take_from(path, self.selection.state.step if self.selection else 0)
        self.sink(Note(f"resumed from the checkpoint at step {state.step}", time.time()))

    def run(self) -> Outcome:
        """Train until the last step, early stopping, a stop order, or the end of the budget.

        Raises:
            BudgetExceededError: the next step could exceed the token budget, or the deadline has passed; a checkpoint
                was written.
            DivergedError: training produced NaN or infinity.
        """
        total, message = self.recipe.steps, ""
        self.meter(self.tokens, 0)
        if self._saved < 0 and self.best:
            self.best.take_from(None)  # removes partial models that a lost process left
        self._publish_weights()
        while True:
            order = self.orders()
            if order is not Order.GO_ON:
                self._save()
            if order is Order.STOP:
                return Outcome("stopped", self._step, self.tokens, self._metrics)
            self._afford()
            self._probe()
            if self._step == total:
                break
            if self.selection and self.selection.over:
                message = self.selection.told(self._step, total)
                self.sink(Note(message, time.time()))
                break
            self._advance()
            if self._step % self.every == 0 or self._step == total:
                self._save()
        self.meter(self.tokens, 0)
        if self._idle and self._step:
            idle = f"none of {self._step} steps updated weights: the stage returns the weights that it started from"
            self.sink(Note(f"{idle}; check the rewards of its samples", time.time(), "warning"))
            self._metrics |= {UNCHANGED: 1.0}
        chosen = self.selection.metrics(self._step if message else None) if self.selection else {}
        return Outcome("succeeded", self._step, self.tokens, self._metrics | chosen, message)

    def _advance(self) -> None:
        started, self._began = time.perf_counter(), self.recipe.journal.consumed
        report = self.recipe.step(self._step, Trace(self.sink, self._step), self._reserve)
        crashpoint("train.step")
        self._step += 1
        self._publish_weights()
        speed = report.tokens / max(time.perf_counter() - started, 1e-9)
        self._idle &= report.metrics.get("updates") == 0.0
        self._report(report, {**report.took, "tokens_per_second": speed, **peak_memory()})
        self.sink(Progress(self._step, self.recipe.steps, self.recipe.phase, self.tokens, time.time()))

    def _publish_weights(self) -> None:
        """Publish the weights of the last update, with which the next rollout samples."""
        with Trace(self.sink, max(self._step - 1, 0)).span("weights") as span:
            attested = self.recipe.publish_weights(PolicyVersion(self._incarnation, self._step))
            span |= {"attested": attested} if attested else {}
        self.recorder.step = self._step

    def _probe(self) -> None:
        report = self.recipe.probe(self._step, Trace(self.sink, self._step))
        if not report:
            return
        self._report(report, {})
        if self.selection and self.selection.see(self._step, report.metrics) and self.best:
            with Trace(self.sink, self._step).span("best"):
                self.best.keep(self._step)

    def _report(self, report: StepReport, extra: dict[str, float]) -> None:
        self.tokens += report.tokens
        self._metrics |= report.metrics
        self.sink(Metric(self._step, {**report.metrics, **extra}, time.time()))

    def _reserve(self, spent: int, more: int, *, refuse: bool = True) -> bool:
        """Return whether the further cost of a step that has begun is within the limit.

        Args:
            refuse: raise if the cost is not within the limit.

        Raises:
            BudgetExceededError: the cost exceeds the limit. The tokens spent are counted; a checkpoint was written, and
                a resumed job samples the step's work again.
        """
        limit, step = self.limits.tokens, self._step
        if step == self.recipe.steps - 1:
            more += self.recipe.probe_max_tokens(self.recipe.steps)  # as in `_afford`
        if limit is not None and self.tokens + spent + more > limit:
            if not refuse:
                return False
            self.tokens += spent
            self.recipe.journal.consumed = self._began
            self.recipe.rewind()
            self._save()
            short = tokens_short("replacing dropped groups", more, self.tokens, limit, self.limits.tokens_declared)
            raise BudgetExceededError(f"{short} at step {step} of {self.recipe.steps}; raise budget.tokens")
        self.meter(self.tokens + spent, more)
        return True

    def _afford(self) -> None:
        """Raise if the next probe and step could exceed a limit at their maximum cost."""
        step, limit = self._step, self.limits.tokens
        self.meter(self.tokens, 0)
        worst = self.recipe.probe_max_tokens(step) + (self.recipe.max_tokens(step) if step < self.recipe.steps else 0)
        if step == self.recipe.steps - 1:
            worst += self.recipe.probe_max_tokens(self.recipe.steps)  # reserve the last probe too
        if limit is not None and self.tokens + worst > limit:
            self._save()
            short = tokens_short("the next step", worst, self.tokens, limit, self.limits.tokens_declared)
            raise BudgetExceededError(f"{short} at step {step} of {self.recipe.steps}; raise budget.tokens")
        if self.limits.deadline is not None and step < self.recipe.steps and time.time() >= self.limits.deadline:
            self._save()
            late = seconds_short(self.limits.seconds, self.limits.seconds_declared)
            raise BudgetExceededError(f"{late} at step {step} of {self.recipe.steps}; raise budget.wall_clock")
        self.meter(self.tokens, worst)

    def _save(self) -> None:
        if self._saved == self._step:
            return
        state = TrainState(
            self.fingerprint,
            self._step,
            self.recipe.journal.consumed,
            self.tokens,
            dict(self._metrics),
            self._incarnation,
            asdict(self.selection.state) if self.selection else None,
            not self._idle,
        )
        self.flush()
        with Trace(self.sink, self._step).span("checkpoint"):
            path = begin_checkpoint(self.checkpoints, self._step)
            if path is not None:
                written = {**self.recipe.roles.save(path), **self.recipe.save(path)}
                commit_checkpoint(path, state, {**written, **(self.best.put_into(path) if self.best else {})})
        self._saved = self._step


@final
class LossProbe:
    """The probe of an algorithm that reads rows: the algorithm's objective on held-out rows, without dropout.

    Args:
        batch: the held-out rows.
    """

    max_tokens = 0  # the probe does not sample or train

    def __init__(self, batch: TokenBatch) -> None:
        self._batch = batch

    def __call__(self, learning: Learning, /) -> StepReport:
        """Return `probe/loss` of the current weights, and the objective's other metrics."""
        return StepReport(self.max_tokens, learning.measure(self._batch))


class FromRows(Generic[R]):
    """The recipe around an algorithm that reads rows.

    Args:
        config: the stage's parameters.
        algorithm: forms documents, assigns credit, and defines the updates.
        roles: the roles that learn and fill columns.
        rows: all rows.
        seed: the stage's seed.
        held_out: rows on which the objective is measured during training.
        phase: the phase in reports of progress.

    Raises:
        InputError: the algorithm needs a role that does not exist.
    """

    def __init__(
        self,
        config: RowsConfig,
        algorithm: RowAlgorithm[R],
        roles: Roles,
        rows: Sequence[R],
        seed: int,
        held_out: Sequence[R] = (),
        *,
        phase: str = "train",
    ) -> None:
        self.phase, self.steps, self.roles = phase, config.steps, roles
        self.journal = Journal(len(rows), seed)
        self._algorithm, self._rows, self._seed = algorithm, rows, seed
        self._learning = Learning(algorithm, roles, config.steps, seed)
        probe = LossProbe(algorithm.form(held_out, derive_seed(seed, "probe"))) if held_out else None
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)
        roles.rest()

    def max_tokens(self, step: int) -> int:
        """Return the exact number of tokens in the next batch, times the number of passes."""
        rows = self.journal.peek(self._algorithm.source.rows)
        return self._learning.max_tokens(step, sum(self._algorithm.max_tokens(self._rows[row]) for row in rows))

    def step(self, step: int, trace: Trace, reserve: Reserve = free) -> StepReport:
        """Train on one batch."""
        with trace.span("pack") as span:
            rows = [self._rows[row] for _, row in self.journal.take(self._algorithm.source.rows)]
            batch = self._algorithm.form(rows, derive_seed(self._seed, "form", step))
            span |= {"tokens": sum(batch.lengths), "response_tokens": int(batch.response_mask.sum())}
        learned = self._learning.learn(batch, step, trace)
        return StepReport(learned.tokens, learned.metrics)

    def publish_weights(self, version: PolicyVersion) -> None:
        """Do nothing: no role samples."""

    def rewind(self) -> None:
        """Do nothing, because no work outlasts a step."""

    def save(self, path: Path) -> Mapping[str, str]:
        """Write nothing: there is no state between two steps."""
        return {}

    def restore(self, path: Path) -> None:
        """Read nothing: `save` writes nothing."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Return the held-out measurement, if one is due."""
        return self._probe.measure(step, trace, self._learning)

    def probe_max_tokens(self, step: int) -> int:
        """Return 0: reading without sampling or training uses no budget (`jobs.Progress`)."""
        return self._probe.max_tokens(step)


def open_learner(config: RowsConfig, model: Source, seed: int, pool_of: PoolOf) -> Roles:
    """Start the roles of an algorithm that reads rows: the learner and, if the algorithm has one, the reference."""
    role, *others = config.roles()
    learner = _learner(config, role, model, seed, pool_of, dropout=config.dropout)
    tokens = micro_batch_tokens(config.runtime, pool_of(role.name).processes[0].device)
    shard = config.runtime.shard_frozen is True
    recalled = {one.name: learner for one in others if config.recalls(one)}
    frozen = {
        one.name: pool_of(one.name)
        .by_rank()
        .start(one.name, FrozenWorker, model, micro_batch_tokens=tokens, shard=shard)
        for one in others
        if one.name not in recalled
    }
    return Roles({role.name: learner}, frozen, recalled=recalled, sleeps=_sleeps(config, pool_of))


def open_roles(
    config: SamplingConfig,
    model: ModelSource | LanguageModel,
    seed: int,
    pool_of: PoolOf,
    *,
    sources: Mapping[str, FrozenSource] = MappingProxyType({}),
    engine: RolloutEngine | None = None,
    stop: Sequence[str] = (),
) -> Roles:
    """Start the roles of an algorithm that samples.

    The policy starts first, because a rollout in the policy's pool reads the policy's weights.

    Args:
        model: the starting policy, and the initial model of each role that is not in `sources`.
        sources: role → its initial model.
        engine: a rollout engine in the controller's process; None: `config.rollout.engine`.
        stop: strings that end a response; if any are given, each rollout rank opens the tokenizer.
    """
    learners: dict[str, WorkerGroup[TrainWorker]] = {}
    policy, *others = (role for role in config.roles() if role.model or role.url)
    opened: dict[str, FrozenSource] = {role.name: sources.get(role.name, model) for role in others}
    learners["policy"] = _learner(config, policy, model, seed, pool_of, temperature=config.temperature)
    folder = model if isinstance(model, ModelSource) else None
    cache = None if config.runtime.kv_cache == "auto" else config.runtime.kv_cache
    home = pool_of("rollout").by_rank()
    rollout = home.start(
        "rollout",
        RolloutWorker,
        folder,
        engine,
        kv_cache=cache,
        reads_text=bool(stop),
        name=config.rollout.engine,
        patience=home.deadlines.call,
    )
    tokens = micro_batch_tokens(config.runtime, pool_of("policy").processes[0].device)
    frozen: dict[str, WorkerGroup[FrozenWorker]] = {}
    recalled = {role.name: learners["policy"] for role in others if config.recalls(role)}
    for role in others:
        source = opened[role.name]
        if role.trained and not isinstance(source, RemoteSource):
            learners[role.name] = _learner(config, role, source, seed, pool_of)
        elif role != ROLLOUT and role.name not in recalled:
            frozen[role.name] = _frozen(config, role, source, learners["policy"], pool_of, tokens)
    sleeps = _sleeps(config, pool_of)
    return Roles(learners, frozen, rollout, sleeps=sleeps, micro_batch_tokens=tokens, recalled=recalled)


def _learner(
    config: TrainingConfig, role: RoleSpec, model: Source, seed: int, pool_of: PoolOf, **more: Any
) -> WorkerGroup[TrainWorker]:
    """Start a role that learns."""
    optimizer, first = config.learning(role.name)
    words: dict[str, Any] = {"name": role.name, "steps": config.steps, "seed": seed, "first": first, **more}
    return pool_of(role.name).start(
        role.name, TrainWorker, model, optimizer, config.runtime, engine=config.train.engine, **words
    )


def _frozen(
    config: SamplingConfig,
    role: RoleSpec,
    model: FrozenSource,
    policy: WorkerGroup[TrainWorker],
    pool_of: PoolOf,
    tokens: int,
) -> WorkerGroup[FrozenWorker]:
    """Start a role that predicts: language models at the policy's temperature, and wide ones of its vocabulary."""
    return (
        pool_of(role.name)
        .by_rank()
        .start(
            role.name,
            FrozenWorker,
            model,
            name=role.name,
            micro_batch_tokens=tokens,
            temperature=config.temperature if role.head == "language" else 1.0,
            vocabulary=policy.one(TrainWorker.vocabulary) if role.wide else None,
            shard=config.runtime.shard_frozen is True and not role.url,
        )
    )


def _sleeps(config: TrainingConfig, pool_of: PoolOf) -> bool:
    nap = config.placement.sleep
    return pool_of(config.roles()[0].name).processes[0].device.startswith("cuda") if nap == "auto" else bool(nap)
