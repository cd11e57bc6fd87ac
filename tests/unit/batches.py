"""Packed batches as tests cut them."""

from __future__ import annotations

from posttrain.engine.batch import TokenBatch
from posttrain.pacing.balance import micro_batches


def pieces(batch: TokenBatch, budget: int) -> list[TokenBatch]:
    """Micro-batches of at most `budget` tokens, as a learner makes them."""
    return [batch.select_items(shard) for shard in micro_batches(batch.item_lengths, batch.item_lengths, budget)]
