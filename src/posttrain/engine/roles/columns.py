"""Where a prediction stands in a batch."""

from __future__ import annotations

from torch import Tensor

from posttrain.engine.batch import Need, TokenBatch


def with_prediction(batch: TokenBatch, column: str, need: Need, found: Tensor) -> TokenBatch:
    """The batch with a prediction as a column: scores are a document's, everything else is a token's."""
    return batch.with_document_columns(**{column: found}) if need == "scores" else batch.with_columns(**{column: found})
