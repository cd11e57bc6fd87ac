"""Wide columns of a batch: a role computes them and keeps them, and the batch is told where they are."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.domain.errors import InputError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import StoredShard
from posttrain.engine.groups.worker_group import Future
from posttrain.engine.loop.roles import Roles
from posttrain.engine.recipes.algorithm import Column
from posttrain.engine.roles.frozen import FrozenWorker
from posttrain.engine.wide import RowsHandle, WideColumn, WideRows


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
