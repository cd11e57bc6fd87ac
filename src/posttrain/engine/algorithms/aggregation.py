"""How per-token losses become one number, so that gradients do not depend on how a batch is split.

A mean inside each micro-batch would weight tokens by the company they keep. Here every token gets its weight from
totals of the whole optimiser step, and a micro-batch's loss is the plain sum Σ weight·loss: the parts add up to the
same loss, and so to the same gradient, for every split. Only response tokens count; prompts never enter a
denominator. Who counts the totals decides whether documents that are not computed are in them: a document whose loss is
zero may then be dropped without changing anything (`recipes.grpo`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.engine.batch import TokenBatch

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


# what `token_weights` divides by: of a loss whose every term is, gradients of parts may be summed and then divided
DENOMINATORS: dict[str, Literal["tokens", "sequences"]] = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum-norm": "sequences",
}


@dataclass(frozen=True, slots=True)
class Totals:
    """What one optimiser step sums over: `Totals(tokens=1832, sequences=96, items=96, computed=1832)`.

    Losses are divided by what counts, whether it is computed or not; metrics are means over what is computed.
    """

    tokens: int  # response tokens
    sequences: int  # documents with at least one response token
    items: int  # units, or documents where there are none
    computed: int  # response tokens of what has a gradient

    @classmethod
    def of(cls, batch: TokenBatch, computed: TokenBatch | None = None) -> Totals:
        """Count a whole mini-batch, before it is split.

        Args:
            computed: the part of it that has a gradient; None: all of it.
        """
        lengths = batch.response_lengths
        tokens = int(lengths.sum())
        part = tokens if computed is None else int(computed.response_mask.sum())
        return cls(tokens, int((lengths > 0).sum()), len(batch.item_lengths), part)


def token_weights(
    batch: TokenBatch, totals: Totals, mode: str, *, norm: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[T]`: the weight of every token in the loss of the whole step; 0 outside the response.

    ::

        token-mean               1 / tokens                         DAPO, arXiv 2503.14476
        seq-mean-token-mean      1 / (sequences · own length)       GRPO, arXiv 2402.03300
        seq-mean-token-sum-norm  1 / (sequences · norm)             Dr. GRPO, arXiv 2503.20783

    Args:
        batch: the micro-batch.
        totals: of the whole step.
        norm: the constant length of Dr. GRPO, in tokens (the generation limit).
        dtype: of the weights: that of the loss (`precision`).

    Raises:
        ValueError: an unknown mode.
    """
    mask = batch.response_mask
    if mode == "token-mean":
        return mask.to(dtype) / max(totals.tokens, 1)
    if mode == "seq-mean-token-sum-norm":
        return mask.to(dtype) / (max(totals.sequences, 1) * norm)
    if mode == "seq-mean-token-mean":
        each = 1.0 / (batch.response_lengths.clamp(min=1) * max(totals.sequences, 1)).to(dtype)
        return torch.where(mask, each[batch.document_index], 0.0)
    raise ValueError(f"aggregation must be one of {', '.join(MODES)}, got {mode!r}")
