"""Gradients that are summed while other groups of the step are still sampled, and divided when all are there.

What an update divides its loss by is known when the last group has come. Where that is one number for every term, and
credit is given to each group by itself, the sum can begin before; else `Learning` waits for the whole batch. Weights
change once a step, behind the last group, as they would otherwise: sampling stays on the policy that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.worker_group import Future
from posttrain.engine.loop.columns import Columns, Form, attached, credited
from posttrain.engine.loop.roles import Roles
from posttrain.engine.recipes.algorithm import Algorithm, ScoredGroup, Update
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.roles.update import Division
from posttrain.engine.roles.update import Update as Done
from posttrain.engine.tracing import SampleTracer, Trace

_ONE = Totals(1, 1, 1, 1)  # a loss that is divided by these is a sum


@final
@dataclass(frozen=True, slots=True)
class _Summed:
    """A stretch whose gradient was asked for."""

    batch: TokenBatch  # with its credit
    totals: Totals
    tokens: int  # that are computed
    answer: Future[Done] | None  # None: nothing of it has a gradient


@final
@dataclass(frozen=True, slots=True)
class Streamed:
    """What became of a step."""

    metrics: dict[str, float]
    tokens: int
    batch: TokenBatch  # the whole, with its columns


@final
class Gradients:
    """The one update of an algorithm, in stretches.

    Args:
        algorithm, roles, steps: of the stage.
        columns: says which stretches are whole, and fills them.
        followed: samples at the beginning of a step whose way is traced.

    Raises:
        InputError: the algorithm has another number of updates, one that is not streamable, or documents that are not
            formed by group.
    """

    def __init__(self, algorithm: Algorithm, roles: Roles, columns: Columns, steps: int, followed: int) -> None:
        self._algorithm, self._roles, self._columns, self._followed = algorithm, roles, columns, followed
        self._coming: dict[int, list[_Summed]] = {}  # by step
        for step in {0, steps - 1}:
            self._update(step)

    def offer(self, step: int) -> bool:
        """Begin with every stretch that is whole and has its columns, in order; whether one waits for columns."""
        summed = self._coming.setdefault(step, [])
        for asked in self._columns.whole(step)[len(summed) :]:
            if not asked.ready(self._algorithm.requires(step)):
                return True
            summed.append(self._sum(asked.filled(), step, summed))
        return False

    def forget(self, step: int | None = None) -> None:
        """Nothing that was begun of a step, or of any, is updated; who learns drops it with the next update."""
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
        """The step's update, when every group is there.

        Raises:
            DivergedError: loss or gradient is NaN or infinite.
            InputError: credit of all groups together is another than that of each.
        """
        columns = self._algorithm.requires(step)
        told: AbstractContextManager[dict[str, Any]] = trace.span("columns") if columns else nullcontext({})
        with told as span:
            span |= {"columns": [column.name for column in columns]}
            parts = [part.filled() for part in self._columns.parts(batch, step, groups, form)]
            self._roles.rest()
        whole = attached(batch, parts, columns, self._name)
        with trace.span("update"):
            return self._finish(whole, parts, step, tracer)

    def _finish(
        self, whole: TokenBatch, parts: Sequence[TokenBatch], step: int, tracer: SampleTracer | None
    ) -> Streamed:
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
            minimised = update.objective(_ONE)
            record = before < self._followed
            answer = learner.map(
                TrainWorker.update, computed, minimised, step=step, part=number, record=record, more=True
            )
        return _Summed(batch, Totals.of(batch, computed), sum(computed.lengths) if chosen else 0, answer)

    def _divide(self, summed: Sequence[_Summed], step: int) -> dict[str, float]:
        update, totals = self._update(step), [one.totals for one in summed]
        shared = sum(getattr(one, str(update.streamable)) for one in totals)
        division = Division(max(shared, 1), max(sum(one.computed for one in totals), 1))
        nothing, learner = summed[0].batch.select_items([]), self._roles.learners[update.role]
        done = learner.map(TrainWorker.update, nothing, update.objective(_ONE), step=step, divide=division)
        return dict(done.metrics)

    def _update(self, step: int) -> Update:
        updates = self._algorithm.updates(step)
        one = updates[0] if len(updates) == 1 else None
        if one is None or not one.streamable or one.epochs != 1 or one.mini_batches != 1:
            raise InputError(
                f"stream_gradients needs one update whose terms share a denominator, in one mini-batch, got "
                f"{self._name}, whose updates do not; set it to false"
            )
        if not getattr(self._algorithm, "groupwise", False):
            raise InputError(
                f"stream_gradients needs documents that are formed by group, got {self._name}, which forms others; set "
                "it to false"
            )
        late = [column.role for column in self._algorithm.requires(step) if not self._roles.early(column.role)]
        if late:
            raise InputError(
                f"stream_gradients needs roles that answer while the rollout works, got {late[0]} in a pool that it "
                f"shares with others and sleeps in; write placement: {{{late[0]}: {{…}}}} or sleep: false"
            )
        return one

    def _refuse_shared_credit(self, whole: TokenBatch, parts: Sequence[TokenBatch]) -> None:
        given, alone = whole.column("advantages"), torch.cat([part.column("advantages") for part in parts])
        if not torch.allclose(given, alone, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise InputError(
                f"stream_gradients needs credit that is given to each group by itself, got {self._name}, whose "
                f"advantages of all groups differ by {float((given - alone).abs().max()):.3g}; set it to false"
            )

    @property
    def _name(self) -> str:
        return type(self._algorithm).__name__
