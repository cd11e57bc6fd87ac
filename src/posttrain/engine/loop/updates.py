"""The optimiser steps of one training step, computed from the step's documents.

A step computes columns, credit, and the mini-batches of every role that learns. If the stage's roles cannot meet an
algorithm's needs, the stage is rejected before anything is sampled.

Streamed gradients are summed while other groups of the step are still sampled, and are divided when all groups have
arrived, because the divisor of an update's loss is known only then. The sum can begin early if the divisor is the same
for every term and credit is assigned to each group separately; otherwise `Learning` waits for the whole batch. Weights
change once per step, after the last group, as without streaming: the sampling policy stays the trained policy.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Note
from posttrain.engine.algorithms.objectives import COUNTS, Objective, Totals, kl_estimate, log_ratio
from posttrain.engine.batch import Need, Predictions, Provenance, TokenBatch
from posttrain.engine.groups.worker_group import Future
from posttrain.engine.loop.pipeline import Columns, Form, ask, attached, credited, refuse_odd
from posttrain.engine.loop.publication import Roles
from posttrain.engine.recipes.algorithm import Algorithm, Column, ScoredGroup, Update
from posttrain.engine.roles.port import Division, Update as Done
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.trace import SampleTracer, Trace
from posttrain.engine.weights.probe import tolerance

_ROUNDING = 5e-7  # of k3, about half the mean squared difference of two log-probabilities, in float32
_LOOK = 0.02  # seconds of other work between two polls of an update
Meanwhile = Callable[[Trace, float], bool]


def refuse_missing(algorithm: Algorithm, roles: Roles, step: int) -> None:
    """Check the columns and objectives of a step against the stage's roles and the predictions of their models.

    Raises:
        InputError: a role does not exist, or must learn but does not; a model lacks a prediction that a column or an
            objective needs; no role can fill a wide column.
    """
    columns, updates, name = algorithm.requires(step), algorithm.updates(step), type(algorithm).__name__
    there = roles.learners.keys() | roles.frozen.keys() | roles.recalled.keys()
    for column in columns:
        if column.role not in there:
            raise InputError(
                f"{name} needs the role {column.role} for {column.name}, but the open roles are "
                f"{', '.join(sorted(there))}; declare {column.role} in the stage's roles"
            )
    refuse_odd(columns, roles, name)
    for update in updates:
        if update.role not in roles.learners:
            trained = ", ".join(roles.learners)
            raise InputError(
                f"{name} trains the role {update.role}, but the roles that learn are {trained}; declare {update.role} "
                "with trained: true"
            )
    asked = [(column.role, column.need, f"{name} needs {column.need} for {column.name}") for column in columns]
    for update in updates:
        objective = update.objective(Totals.ones())
        if not hasattr(objective, "denominators"):
            raise InputError(
                f"{name}: the objective {type(objective).__name__} must have the attribute denominators, got none; see "
                "Objective.denominators"
            )
        needs = sorted(objective.needs)
        asked += [(update.role, need, f"the objective of {name} needs {need}") for need in needs]
    can = {role: _predicted(roles, role) for role, _, _ in asked}
    for role, need, who in asked:
        if need not in can[role]:
            told = " and ".join(sorted(can[role]))
            raise InputError(f"{who}, got the role {role}, whose model predicts {told}; request it from another role")


def _denominators(update: Update) -> frozenset[str]:
    return update.objective(Totals.ones()).denominators


def _summing(update: Update) -> Objective:
    """Return the objective whose loss is a plain sum."""
    return update.objective(Totals.ones(_denominators(update)))


def _predicted(roles: Roles, role: str) -> frozenset[Need]:
    learns = roles.learners.get(role) or roles.recalled.get(role)
    return learns.one(TrainWorker.predicts) if learns else roles.frozen[role].one(FrozenWorker.predicts)


@final
@dataclass(frozen=True, slots=True)
class _Summed:
    """A stretch whose gradient was requested."""

    batch: TokenBatch  # with credit
    totals: Totals
    tokens: int  # tokens that are computed
    answer: Future[Done] | None  # None: no document has a gradient


@final
@dataclass(frozen=True, slots=True)
class Streamed:
    """The result of a step with streamed gradients."""

    metrics: dict[str, float]
    tokens: int
    batch: TokenBatch  # the whole batch, with its columns


@final
class Gradients:
    """The single update of an algorithm, computed in stretches.

    Args:
        algorithm, roles, steps: the stage's algorithm, roles and number of steps.
        columns: lists complete stretches, and fills them.
        followed: number of traced samples at the beginning of a step.

    Raises:
        InputError: the algorithm does not have exactly one update, the update is not streamable, or documents are not
            formed by group.
    """

    def __init__(self, algorithm: Algorithm, roles: Roles, columns: Columns, steps: int, followed: int) -> None:
        self._algorithm, self._roles, self._columns, self._followed = algorithm, roles, columns, followed
        self._coming: dict[int, list[_Summed]] = {}  # by step
        for step in {0, steps - 1}:
            self._update(step)

    def offer(self, step: int) -> bool:
        """Begin every complete stretch that has its columns, in order; return whether a stretch waits for columns."""
        summed = self._coming.setdefault(step, [])
        for asked in self._columns.whole(step)[len(summed) :]:
            if not asked.ready(self._algorithm.requires(step)):
                return True
            summed.append(self._sum(asked.filled(), step, summed))
        return False

    def forget(self, step: int | None = None) -> None:
        """Drop the sums of a step, or of all steps; the learner drops its sum when the next update begins."""
        if step is None:
            self._coming.clear()
        else:
            self._coming.pop(step, None)

    def finish(
        self,
        batch: TokenBatch,
        step: int,
        groups: Sequence[ScoredGroup],
        form: Form,
        trace: Trace,
        tracer: SampleTracer | None,
    ) -> Streamed:
        """Complete the step's update, after every group has arrived.

        Raises:
            DivergedError: loss or gradient is NaN or infinite.
            InputError: the credit assigned to all groups together differs from the credit assigned to each group alone.
        """
        columns = self._algorithm.requires(step)
        told: AbstractContextManager[dict[str, Any]] = trace.span("columns") if columns else nullcontext({})
        with told as span:
            span |= {"columns": [column.name for column in columns]}
            parts = [part.filled() for part in self._columns.parts(batch, step, groups, form)]
            self._roles.rest()
        whole = attached(batch, parts, columns, self._name)
        with trace.span("update"):
            summed = self._coming.pop(step, [])
            for part in parts[len(summed) :]:
                summed.append(self._sum(part, step, summed))
            self._refuse_shared_credit(credited(self._algorithm, whole), [one.batch for one in summed])
            for number, one in enumerate(summed):
                done = one.answer.result() if one.answer else None
                if tracer and done:
                    tracer.consumed(done.batch, number)
            tokens = sum(one.tokens for one in summed)
            return Streamed(self._divide(summed, step) if tokens else {}, tokens, whole)

    def _sum(self, part: TokenBatch, step: int, summed: Sequence[_Summed]) -> _Summed:
        number, before = len(summed), sum(len(one.batch) for one in summed)
        update, batch = self._update(step), credited(self._algorithm, part)
        chosen = list(update.computes(batch))
        computed = batch if len(chosen) == len(batch.item_lengths) else batch.select_items(chosen)
        answer = None
        if chosen:
            learner = self._roles.learners[update.role].nonblocking
            minimised = _summing(update)
            record = before < self._followed
            answer = learner.map(
                TrainWorker.update, computed, minimised, step=step, part=number, record=record, more=True
            )
        totals = Totals.of(batch, computed, _denominators(update))
        return _Summed(batch, totals, sum(computed.lengths) if chosen else 0, answer)

    def _divide(self, summed: Sequence[_Summed], step: int) -> dict[str, float]:
        update, totals = self._update(step), [one.totals for one in summed]
        [shared] = _denominators(update)
        whole = sum(getattr(one, shared) if shared in COUNTS else one.sums[shared] for one in totals)
        division = Division(whole or 1, max(sum(one.computed for one in totals), 1))
        nothing, learner = summed[0].batch.select_items([]), self._roles.learners[update.role]
        done = learner.map(TrainWorker.update, nothing, _summing(update), step=step, divide=division)
        return dict(done.metrics)

    def _update(self, step: int) -> Update:
        updates = self._algorithm.updates(step)
        one = updates[0] if len(updates) == 1 else None
        shared = one is not None and one.by_group and len(_denominators(one)) == 1
        if one is None or not shared or one.epochs != 1 or one.mini_batches != 1:
            raise InputError(
                f"stream_gradients needs one update whose terms share a denominator, in one mini-batch, got "
                f"{self._name}, whose updates do not; set it to false"
            )
        if not getattr(self._algorithm, "groupwise", False):
            raise InputError(
                f"stream_gradients needs documents that are formed by group, but {self._name} forms documents "
                "differently; set stream_gradients to false"
            )
        late = [column.role for column in self._algorithm.requires(step) if not self._roles.early(column.role)]
        if late:
            raise InputError(
                f"stream_gradients needs roles that compute while the rollout works, but {late[0]} shares the "
                f"rollout's pool or sleeps in a shared pool; write placement: {{{late[0]}: {{…}}}} or sleep: false"
            )
        return one

    def _refuse_shared_credit(self, whole: TokenBatch, parts: Sequence[TokenBatch]) -> None:
        given, alone = whole.column("advantages"), torch.cat([part.column("advantages") for part in parts])
        if not torch.allclose(given, alone, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise InputError(
                "stream_gradients needs credit that is assigned to each group separately, but the advantages of "
                f"{self._name} change by {float((given - alone).abs().max()):.3g} when all groups are computed "
                "together; set stream_gradients to false"
            )

    @property
    def _name(self) -> str:
        return type(self._algorithm).__name__


@final
@dataclass(frozen=True, slots=True)
class Learned:
    """The result of a step's updates."""

    metrics: Mapping[str, float]  # means over mini-batches; the metrics of other roles have the role as prefix
    tokens: int = 0  # tokens trained on, counted once per role and pass
    updates: int = 0  # optimiser steps of the stage's own role
    first: Mapping[str, float] = field(default_factory=dict)  # metrics of the first update, before any weight changed


@final
class Learning:
    """Trains the roles of a stage on the documents that its algorithm forms.

    Args:
        algorithm: the objectives, and the columns that they read.
        roles: the roles that learn and fill columns.
        steps: the number of steps of the stage.
        seed: the stage's seed.
        lag: number of steps by which sampling is ahead; without a lag the learner has the sampling weights, so
            log-probabilities must agree.
        streams: whether to sum gradients as groups arrive.
        followed: number of traced samples at the beginning of a step.
        meanwhile: called with a number of seconds while an update is in progress; works for at most this time, and
            returns whether more work is left.

    Raises:
        InputError: see `refuse_missing`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        roles: Roles,
        steps: int,
        seed: int,
        *,
        lag: int = 0,
        streams: bool = False,
        followed: int = 0,
        meanwhile: Meanwhile = lambda trace, seconds: False,
    ) -> None:
        self._algorithm, self._roles, self._seed, self._compares = algorithm, roles, seed, not lag
        self.columns = Columns(algorithm, roles, lag, always=streams)
        self.gradients = Gradients(algorithm, roles, self.columns, steps, followed) if streams else None
        self._meanwhile = meanwhile
        for step in {0, steps - 1}:
            refuse_missing(algorithm, roles, step)

    def max_tokens(self, step: int, tokens: int) -> int:
        """Return the maximum number of tokens that are trained on if the documents have `tokens` tokens."""
        return tokens * sum(update.epochs for update in self._algorithm.updates(step))

    def learn(
        self,
        batch: TokenBatch | None,
        step: int,
        trace: Trace,
        tracer: SampleTracer | None = None,
        groups: Sequence[ScoredGroup] = (),
        form: Form | None = None,
    ) -> Learned:
        """Fill the columns, assign credit, and update the roles that learn.

        Args:
            groups, form: see `Columns.fill`.

        Raises:
            DivergedError: loss or gradient is NaN or infinite.
        """
        if batch is None:
            self.forget(step)
            return Learned({})
        batch = replace(batch, provenance=Provenance(step=step))
        if self.gradients and form:
            done = self.gradients.finish(batch, step, groups, form, trace, tracer)
            self._compare(done.metrics.get("mismatch_kl", 0.0), trace)
            told = {**_distance(done.batch), **done.metrics}
            return Learned(told, done.tokens, 1 if done.tokens else 0, done.metrics)
        columns = self._algorithm.requires(step)
        if columns:
            with trace.span("columns") as span:
                batch = self.columns.fill(batch, step, groups, form)
                span |= {"columns": [column.name for column in columns]}
            self._roles.rest()
        with trace.span("advantage"):
            batch = credited(self._algorithm, batch)
        with trace.span("update"):
            learned = self._updated(batch, step, trace, tracer)
        stale = _staleness(batch)
        self._compare(stale.get("lag/kl", learned.first.get("mismatch_kl", 0.0)), trace)
        return replace(learned, metrics={**_distance(batch), **stale, **_first(learned), **learned.metrics})

    def forget(self, step: int | None = None) -> None:
        """Drop the computations for a step, or for all steps, because their groups will not be trained on."""
        self.columns.forget(step)
        if self.gradients:
            self.gradients.forget(step)

    def measure(self, batch: TokenBatch) -> dict[str, float]:
        """Return `probe/loss` of the stage's own model on a batch and the objective's other metrics; do not train."""
        role = next(iter(self._roles.learners))
        batch = replace(batch, provenance=Provenance(role=role))
        batch = credited(self._algorithm, ask(self._roles, batch, self._algorithm.requires(0)).filled())
        [update] = (update for update in self._algorithm.updates(0) if update.role == role)
        objective = update.objective(Totals.of(batch, None, _denominators(update)))
        named = [Column(f"predicted_{need}", role, need) for need in sorted(objective.needs)]
        asked = ask(self._roles, batch, named).filled()
        parts = objective(batch, Predictions(**{need: asked.column(f"predicted_{need}") for need in objective.needs}))
        return {f"probe/{name}": float(value) for name, value in {"loss": parts.loss, **parts.sums}.items()}

    def _updated(self, batch: TokenBatch, step: int, trace: Trace, tracer: SampleTracer | None) -> Learned:
        """Train every role's mini-batches; mini-batches of the same number run concurrently."""
        updates, main = self._algorithm.updates(step), next(iter(self._roles.learners))
        plans = [list(self._mini_batches(batch, update, step)) for update in updates]
        reports: dict[str, list[Mapping[str, float]]] = {update.role: [] for update in updates}
        trained = 0
        for part in range(max(map(len, plans), default=0)):
            begun = []
            for update, plan in zip(updates, plans, strict=True):
                found = plan[part] if part < len(plan) else None
                if found is not None:
                    follows = tracer if update.role == main else None
                    begun.append((update, self._begin(update, *found, step=step, part=part, tracer=follows)))
                    trained += sum(found[0].lengths)
            for update, answer in begun:
                while not answer.done() and self._meanwhile(trace, _LOOK):
                    pass
                done = answer.result()
                reports[update.role].append(done.metrics)
                if tracer and update.role == main:
                    tracer.consumed(done.batch, part)
        own = reports.get(main, [])
        return Learned(_means(reports, main), trained, len(own), own[0] if own else {})

    def _compare(self, found: float, trace: Trace) -> None:
        """Warn, once, if the learner and the rollout compute different log-probabilities with the same weights.

        Args:
            found: KL between learner and rollout, before any weight changed.
        """
        if not self._compares or found <= _ROUNDING:
            return
        learner = next(iter(self._roles.learners.values()))
        rounding = tolerance(learner.one(TrainWorker.epsilon)) ** 2 / 2
        if found <= rounding:
            return
        line = (
            "the policy's log-probabilities must be those of the rollout that sampled, up to rounding (mismatch_kl <= "
            f"{rounding:g}), got {found:.2g} in step {trace.step} with the same weights, and the loss's ratio has the "
            "same error; try runtime.dtype: float32, or report the model"
        )
        trace.sink(Note(line, time.time(), "warning"))
        self._compares = False

    def _begin(
        self, update: Update, mini: TokenBatch, totals: Totals, *, step: int, part: int, tracer: SampleTracer | None
    ) -> Future[Done]:
        objective, learner = update.objective(totals), self._roles.learners[update.role].nonblocking
        record = tracer is not None and tracer.wants(mini)
        return learner.map(TrainWorker.update, mini, objective, step=step, part=part, record=record)

    def _mini_batches(self, batch: TokenBatch, update: Update, step: int) -> Iterator[tuple[TokenBatch, Totals] | None]:
        """Yield the computed documents and the divisors of each mini-batch; None if no document is computed."""
        computed, count = set(update.computes(batch)), len(batch.item_lengths)
        named = _denominators(update)
        for epoch in range(update.epochs):
            seed = derive_seed(self._seed, "mini_batches", step, epoch)
            for items in mini_batches(count, update.mini_batches, seed):
                mini = batch if len(items) == count else batch.select_items(items)
                chosen = [place for place, item in enumerate(items) if item in computed]
                part = mini if len(chosen) == len(items) else mini.select_items(chosen)
                yield (part, Totals.of(mini, part, named)) if chosen else None


def mini_batches(items: int, count: int, seed: int) -> list[list[int]]:
    """Return a seeded shuffle of item numbers cut into `count` parts (fewer when there are fewer items)."""
    count = min(count, items)
    if count <= 1:
        return [list(range(items))]
    order = torch.randperm(items, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[part::count] for part in range(count)]


def _distance(batch: TokenBatch) -> dict[str, float]:
    """Return `kl`: the KL of the sampling policy to the reference (k3, mean over tokens), if both are available."""
    columns = batch.token_columns
    if "reference_logprobs" not in columns or "behaviour_logprobs" not in columns:
        return {}
    mask = batch.response_mask
    found = kl_estimate(columns["behaviour_logprobs"], columns["reference_logprobs"], mask, "k3")
    return {"kl": float(found.sum()) / max(int(mask.sum()), 1)}


def _first(learned: Learned) -> dict[str, float]:
    """Return `mismatch_kl/first`: `mismatch_kl` before any weight changed; nothing if this is the only update."""
    found = learned.first.get("mismatch_kl")
    return {"mismatch_kl/first": found} if found is not None and learned.updates > 1 else {}


def _staleness(batch: TokenBatch) -> dict[str, float]:
    """Return how far the policy at the step's beginning is from the sampling policy, if both are available.

    `lag/kl` is KL(μ ‖ π) (k3, mean over tokens). `lag/ess` is (Σ w)² / (n · Σ w²) for the weights w = π/μ: the
    effective sample size of a mean with these weights, as a share of the tokens.
    """
    columns, mask = batch.token_columns, batch.response_mask
    if not {"proximal_logprobs", "behaviour_logprobs"} <= columns.keys() or not bool(mask.any()):
        return {}
    old, behaviour = columns["proximal_logprobs"], columns["behaviour_logprobs"]
    weights = log_ratio(old, behaviour, mask)[mask].double().exp()
    kl = kl_estimate(behaviour, old, mask, "k3").double().sum() / len(weights)
    ess = weights.sum().square() / (len(weights) * weights.square().sum())
    return {"lag/kl": float(kl), "lag/ess": float(ess)}


def _means(reports: Mapping[str, Sequence[Mapping[str, float]]], main: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for role, told in reports.items():
        prefix = "" if role == main else f"{role}/"
        for name in told[0] if told else ():
            found[f"{prefix}{name}"] = sum(report[name] for report in told) / len(told)
    return found
