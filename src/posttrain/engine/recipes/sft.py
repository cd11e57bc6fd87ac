"""Supervised fine-tuning: maximise log π(completion | prompt), averaged over the tokens of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import SFTConfig
from posttrain.engine.recipes.algorithm import RowAlgorithm, RowSource, Update


@final
@dataclass(frozen=True, slots=True)
class SFT(RowAlgorithm[Document]):
    """SFT over demonstrations: prompt and completion tokens, including the end of sequence."""

    config: SFTConfig

    @property
    def source(self) -> RowSource:
        """The number of documents of a step."""
        return RowSource(self.config.batch_size)

    def max_tokens(self, row: Document) -> int:
        """Return the number of tokens of the row's document."""
        return len(row.prompt) + len(row.response)

    def form(self, rows: Sequence[Document], seed: int) -> TokenBatch:
        """Return the documents, packed unchanged."""
        return TokenBatch.pack(rows)

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update."""
        return (Update("policy", SupervisedObjective),)
