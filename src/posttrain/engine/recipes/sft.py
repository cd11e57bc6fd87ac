"""Supervised fine-tuning: maximise log π(completion | prompt), token mean over the batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from posttrain.engine.algorithms.aggregation import Totals, token_weights
from posttrain.engine.algorithms.losses import negative_log_likelihood
from posttrain.engine.batch import Document, Provenance, TokenBatch
from posttrain.engine.config import SFTConfig
from posttrain.engine.journal import Journal
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.roles.policy import LossParts, Policy


class SFT:
    """The recipe over rendered documents.

    Args:
        config: the stage's parameters.
        model: what to train, in place.
        documents: prompt and completion tokens (end of sequence included) of every row.
        seed: the stage's seed.
    """

    phase = "sft"

    def __init__(self, config: SFTConfig, model: LanguageModel, documents: Sequence[Document], seed: int) -> None:
        self.steps = config.steps
        self.policy = Policy(model, config.optimizer, config.runtime, steps=config.steps, seed=seed, dropout=True)
        self.journal = Journal(len(documents), seed)
        self._config, self._documents = config, documents

    def price(self, step: int) -> int:
        """Exactly the tokens of the coming batch."""
        rows = self.journal.peek(self._config.batch_size)
        return sum(len(self._documents[row].prompt) + len(self._documents[row].response) for row in rows)

    def step(self, step: int, trace: Trace) -> StepReport:
        """One batch, one optimiser step."""
        with trace.span("pack"):
            rows = [row for _, row in self.journal.take(self._config.batch_size)]
            documents = [self._documents[row] for row in rows]
            batch = TokenBatch.pack(documents, self.policy.model.device, Provenance(step=step, role="policy"))
            totals = Totals.of(batch)
        with trace.span("update") as span:
            report = self.policy.update(batch, lambda micro, logprobs: _loss(micro, logprobs, totals), step=step)
            span |= {"tokens": sum(batch.lengths), "response_tokens": totals.tokens}
        return StepReport(sum(batch.lengths), report)

    def probe(self, step: int, trace: Trace) -> None:
        """Nothing to measure beside the loss."""
        return

    def probe_price(self, step: int) -> int:
        """Free."""
        return 0


def _loss(micro: TokenBatch, logprobs: Tensor, totals: Totals) -> LossParts:
    weights = token_weights(micro, totals, "token-mean")
    return LossParts((weights * negative_log_likelihood(logprobs, micro.response_mask)).sum(), {})
