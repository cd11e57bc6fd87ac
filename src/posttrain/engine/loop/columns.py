"""Columns that an algorithm requires, filled in stretches of a step's groups while others are still sampled.

A stretch holds as many kept groups, in the order of the data stream, as fill a micro-batch on every rank of the role
that predicts. So the samples decide which documents are computed together, never the speed of a process, and one
process computes them as several do. Roles that share the rollout's pool compute when it has ended.

A role computes the wide columns of a batch and keeps them, and the batch gets the places of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from posttrain.domain.errors import InputError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import StoredShard
from posttrain.engine.groups.worker_group import Future
from posttrain.engine.loop.publishing import Roles
from posttrain.engine.recipes.algorithm import Algorithm, Column, ScoredGroup
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.wide import RowsHandle, WideColumn, WideRows, joined

Form = Callable[[Sequence[ScoredGroup]], TokenBatch | None]


def refuse_odd(columns: Sequence[Column], roles: Roles, algorithm: str) -> None:
    """Refuse a wide column that nobody can fill.

    Args:
        algorithm: whose columns they are, for the error.

    Raises:
        InputError: one without a width, a width of something else, or one of a role that learns.
    """
    for column in columns:
        if (column.need == "topk") != (column.wide > 0):
            raise InputError(
                f"{algorithm} needs the column {column.name} of {column.need}, got wide={column.wide}; topk is wide, "
                "by one number or more, and nothing else is"
            )
        if column.wide and column.role in roles.learners:
            raise InputError(
                f"{algorithm} needs the wide column {column.name} of a frozen role, got {column.role}, which learns; "
                "ask a role that never does"
            )


def hold(roles: Roles, batch: TokenBatch, column: Column) -> Future[TokenBatch]:
    """Ask for a wide column. The answer is the batch with the places of its rows, which stay with whoever computes."""
    kept = roles.frozen[column.role].nonblocking.map_stored(FrozenWorker.hold, batch, column.wide)
    return Future(lambda: _placed(batch, column, kept.result()), kept.done)


def _placed(batch: TokenBatch, column: Column, shards: Sequence[StoredShard[WideRows]]) -> TokenBatch:
    counts, places = batch.response_lengths.tolist(), dict[int, RowsHandle]()
    for shard in shards:
        for at, document in enumerate(batch.documents_of(shard.items)):
            places[document] = RowsHandle(shard.part, at, counts[document])
    held = tuple(places[document] for document in range(batch.documents))
    return batch.with_wide(column.name, WideColumn(column.wide, held))


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """Columns of some documents that are being computed."""

    batch: TokenBatch
    answers: Mapping[Column, Future[TokenBatch]]

    def filled(self) -> TokenBatch:
        """The documents with their columns, when all are there."""
        batch = self.batch
        for column, answer in self.answers.items():
            batch = _with(batch, column, [answer.result()])
        return batch

    def ready(self, columns: Sequence[Column]) -> bool:
        """Whether all of these are there."""
        return all(column in self.answers and self.answers[column].done() for column in columns)


def ask(roles: Roles, batch: TokenBatch, columns: Sequence[Column]) -> Asked:
    """Every column by its role, side by side where they have devices of their own."""
    answers: dict[Column, Future[TokenBatch]] = {}
    for column in columns:
        words = (batch, column.name, column.need)
        if column.wide:
            answers[column] = hold(roles, batch, column)
        elif column.role in roles.frozen:
            answers[column] = roles.frozen[column.role].nonblocking.map(FrozenWorker.fill, *words)
        else:
            answers[column] = roles.learners[column.role].nonblocking.map(TrainWorker.fill, *words)
    return Asked(batch, answers)


@final
@dataclass(slots=True)
class _Stretch:
    """Groups whose documents are computed together."""

    groups: list[ScoredGroup] = field(default_factory=list)
    tokens: int = 0
    asked: Asked | None = None

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(group.group.key for group in self.groups)


@final
class Columns:
    """What the steps of one stage require.

    Args:
        algorithm: says which columns.
        roles: fill them.
        lag: steps that sampling may be ahead; where it is, only frozen roles know what they will say.
        always: stretches are formed where no column is required, too.
    """

    def __init__(self, algorithm: Algorithm, roles: Roles, lag: int = 0, *, always: bool = False) -> None:
        self._algorithm, self._roles, self._lag, self._always = algorithm, roles, lag, always
        self._coming: dict[int, list[_Stretch]] = {}  # by step

    def offer(self, group: ScoredGroup, form: Form) -> None:
        """A group was kept, in the order of the data stream: what it makes whole is asked for, of those who can answer
        while others are sampled.

        Args:
            form: makes the documents of some groups, of each by itself.
        """
        early, size = self._early(group.step), self._size(group.step)
        if not ((early or self._always) and size):
            return
        stretch = _put(self._coming.setdefault(group.step, []), group, size)
        if stretch.tokens < size:
            return
        batch = form(stretch.groups)
        if batch is not None:
            stretch.asked = ask(self._roles, batch, early)

    def forget(self, step: int | None = None) -> None:
        """What was asked for of a step, or of all, is not trained on."""
        if step is None:
            self._coming.clear()
        else:
            self._coming.pop(step, None)

    def whole(self, step: int) -> list[Asked]:
        """The stretches of a step that are whole, in order, with what was asked for."""
        return [stretch.asked for stretch in self._coming.get(step, []) if stretch.asked]

    def fill(
        self, batch: TokenBatch, step: int, groups: Sequence[ScoredGroup] = (), form: Form | None = None
    ) -> TokenBatch:
        """The documents of a step with its columns; see `parts`."""
        parts = [part.filled() for part in self.parts(batch, step, groups, form)]
        return attached(batch, parts, self._algorithm.requires(step), type(self._algorithm).__name__)

    def parts(self, batch: TokenBatch, step: int, groups: Sequence[ScoredGroup], form: Form | None) -> list[Asked]:
        """The stretches of a step, all of whose columns are asked for.

        Args:
            batch: its documents.
            groups: that they were formed of, in the order of the data stream.
            form: makes the documents of some of them, of each by itself; None: nobody can.
        """
        columns, known, size = self._algorithm.requires(step), self._coming.pop(step, []), self._size(step)
        stretches: list[_Stretch] = []
        for group in groups if form and size else ():
            _put(stretches, group, size)
        asked = {stretch.keys: stretch.asked for stretch in known}
        if form is None or (not asked.keys() & {stretch.keys for stretch in stretches} and len(stretches) < 2):
            return [ask(self._roles, batch, columns)]
        parts = [self._part(stretch, asked.get(stretch.keys), columns, form) for stretch in stretches]
        return [part for part in parts if part]

    def _part(self, stretch: _Stretch, asked: Asked | None, columns: Sequence[Column], form: Form) -> Asked | None:
        """The rest of a stretch's columns, asked for besides."""
        batch = asked.batch if asked else form(stretch.groups)
        if batch is None:
            return None
        there = asked.answers if asked else {}
        rest = ask(self._roles, batch, [column for column in columns if column not in there])
        return Asked(batch, {**there, **rest.answers})

    def _early(self, step: int) -> list[Column]:
        """The columns that can be filled while the rollout works."""
        return [
            column
            for column in self._algorithm.requires(step)
            if self._roles.early(column.role) and (not self._lag or column.role in self._roles.frozen)
        ]

    def _size(self, step: int) -> int:
        """Tokens that fill a micro-batch on every rank of those who are asked; 0: nobody is."""
        ranks = [self._roles.group(column.role).ranks for column in self._algorithm.requires(step)]
        ranks += [self._roles.made.ranks] if self._always else []
        return self._roles.micro_batch_tokens * max(ranks, default=0)


def _put(stretches: list[_Stretch], group: ScoredGroup, size: int) -> _Stretch:
    """Into the last stretch, or into a new one where that is full."""
    if not stretches or stretches[-1].tokens >= size:
        stretches.append(_Stretch())
    stretches[-1].groups.append(group)
    stretches[-1].tokens += sum(map(len, group.answers))
    return stretches[-1]


def credited(algorithm: Algorithm, batch: TokenBatch) -> TokenBatch:
    """The batch with credit given; columns of tokens that were computed more precisely are kept in float32."""
    found = algorithm.credit(batch)
    wide = {name: column.float() for name, column in found.token_columns.items() if column.dtype == torch.float64}
    return found.with_columns(**wide) if wide else found


def attached(batch: TokenBatch, parts: Sequence[TokenBatch], columns: Sequence[Column], name: str) -> TokenBatch:
    """The columns of the parts, in the documents of the whole.

    Raises:
        InputError: those are others.
    """
    ids, lengths = [i for part in parts for i in part.sample_ids], [n for part in parts for n in part.lengths]
    if ids != list(batch.sample_ids) or lengths != list(batch.lengths):
        raise InputError(
            f"{name} says that it forms documents by group, so those of a step must be those of its groups one after "
            f"the other, got {len(batch.lengths)} documents and {len(lengths)}; set groupwise to False"
        )
    for column in columns:
        batch = _with(batch, column, parts)
    return batch


def _with(batch: TokenBatch, column: Column, parts: Sequence[TokenBatch]) -> TokenBatch:
    """A column of the parts, which are the batch's documents one after the other."""
    if column.wide:
        return batch.with_wide(column.name, joined([part.wide_columns for part in parts])[column.name])
    found = torch.cat([part.column(column.name) for part in parts])
    put = batch.with_document_columns if column.need == "scores" else batch.with_columns
    return put(**{column.name: found})
