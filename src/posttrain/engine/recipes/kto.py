"""KTO: the policy learns from completions that are each labelled desirable or undesirable, without pairs.

Source: Ethayarajh et al., arXiv 2402.01306, eq. 7. With the log-ratio r = log π(y|x) − log π_ref(y|x) of a row and the
reference point z₀, the loss of a desirable row is λ_D·(1 − σ(β(r − z₀))), and that of an undesirable row is
λ_U·(1 − σ(β(z₀ − r))). z₀ estimates KL(π ‖ π_ref): the mean log-ratio of each prompt with the completion of the next
row of the batch, at least 0, without a gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from posttrain.engine.algorithms.objectives import LossParts, Totals
from posttrain.engine.batch import Document, Need, Predictions, TokenBatch
from posttrain.engine.config import KTOConfig
from posttrain.engine.models.files import LabelledRow
from posttrain.engine.recipes.algorithm import PROXIMAL, REFERENCE, Column, RowAlgorithm, RowSource, Update


@final
@dataclass(frozen=True, slots=True)
class KTO(RowAlgorithm[LabelledRow]):
    """KTO over labelled rows.

    A step has one optimiser step, so the proximal policy, which has the weights at the beginning of the step, is the
    policy, and z₀ is exact.
    """

    config: KTOConfig

    @property
    def source(self) -> RowSource:
        """The number of labelled rows of a step."""
        return RowSource(self.config.batch_size)

    def requires(self, step: int) -> Sequence[Column]:
        """Return the log-probabilities of the starting policy, and those of the policy for z₀."""
        return (REFERENCE, PROXIMAL)

    def max_tokens(self, row: LabelledRow) -> int:
        """Return the number of tokens of the row; documents that are not trained on cost nothing (`jobs.Progress`)."""
        return len(row.prompt) + len(row.completion)

    def form(self, rows: Sequence[LabelledRow], seed: int) -> TokenBatch:
        """Return the rows, and then each prompt with the completion of another row: of the next (see `_turned`).

        A mismatched completion is cut so that its document is at most as long as the longest row. The document column
        `label` is 1 for desirable rows, −1 for undesirable rows, and 0 for mismatched documents.
        """
        longest = max(map(self.max_tokens, rows))
        own = [Document(row.prompt, row.completion) for row in rows]
        others = [
            Document(row.prompt, other.completion[: longest - len(row.prompt)])
            for row, other in zip(rows, _turned(rows), strict=True)
        ]
        labels = [1.0 if row.label else -1.0 for row in rows] + [0.0] * len(rows)
        return TokenBatch.pack([*own, *others]).with_document_columns(label=torch.tensor(labels))

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add document columns.

        `point` is z₀. `weight` is λ_D or λ_U, and `labelled` is 1, of rows; both are 0 for mismatched documents.
        `share` is the label divided by the number of rows with this label, for metrics.
        """
        labels = batch.column("label")
        ratios = _log_ratios(batch, batch.column("proximal_logprobs"))
        good, bad = (labels > 0).to(ratios.dtype), (labels < 0).to(ratios.dtype)
        return batch.with_document_columns(
            point=ratios[labels == 0].mean().clamp(min=0).expand(len(batch)),
            weight=self.config.desirable_weight * good + self.config.undesirable_weight * bad,
            labelled=good + bad,
            share=good / good.sum().clamp(min=1) - bad / bad.sum().clamp(min=1),
        )

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update on the rows."""
        return (Update("policy", partial(KTOObjective, beta=self.config.beta), computes=_rows),)


def _rows(batch: TokenBatch) -> Sequence[int]:
    """Return the documents that are rows."""
    found: list[int] = batch.column("label").nonzero().flatten().tolist()
    return found


def _turned(rows: Sequence[LabelledRow]) -> list[LabelledRow]:
    """Return the rows turned by one place, or by more if a row would meet itself at the seam of two epochs."""
    turns = [[*rows[by:], *rows[:by]] for by in range(1, max(2, len(rows)))]
    return min(turns, key=lambda turned: sum(row is other for row, other in zip(rows, turned, strict=True)))


def _log_ratios(batch: TokenBatch, logprobs: Tensor) -> Tensor:
    """Return log π(y|x) − log π_ref(y|x), summed over each response, [D]."""
    mask = batch.response_mask
    gained = torch.where(mask, logprobs, 0.0) - torch.where(mask, batch.column("reference_logprobs"), 0.0)
    return batch.sum_by_document(gained)


@final
@dataclass(frozen=True, slots=True)
class KTOObjective:
    """λ·(1 − σ(label·β(r − z₀))) = λ·σ(label·β(z₀ − r)), mean over the step's labelled rows.

    The metrics are the mean rewards β·r of the step's `chosen` (desirable) and `rejected` rows, 0 if the step has none;
    their difference `margin`; and z₀ as `reference_point`.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"labelled"})
    totals: Totals
    beta: float

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        labels, point, share = (micro.column(name) for name in ("label", "point", "share"))
        ratios, count = _log_ratios(micro, predicted.of("logprobs")), self.totals.divisor("labelled")
        losses = micro.column("weight") * torch.sigmoid(self.beta * (point - ratios) * labels)
        rewards = self.beta * ratios.detach()
        sums = {
            "chosen": (share.clamp(min=0) * rewards).sum(),
            "rejected": ((-share).clamp(min=0) * rewards).sum(),
            "margin": (share * rewards).sum(),
            "reference_point": (micro.column("labelled") * point).sum() / count,
        }
        return LossParts(losses.sum() / count, sums)
