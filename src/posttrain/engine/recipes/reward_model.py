"""Reward-model training: the model learns to score the chosen response above the rejected one (Bradley-Terry).

Source: InstructGPT, arXiv 2203.02155, eq. 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from posttrain.engine.algorithms.objectives import LossParts, PreferenceObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import RewardModelConfig, RowsConfig
from posttrain.engine.models.files import PreferencePair
from posttrain.engine.recipes.algorithm import RowAlgorithm, RowSource, Update


@dataclass(frozen=True, slots=True)
class OverPairs(RowAlgorithm[PreferencePair]):
    """An algorithm over preference pairs; a unit is the chosen response followed by the rejected one."""

    config: RowsConfig

    @property
    def source(self) -> RowSource:
        """The number of pairs of a step."""
        return RowSource(self.config.batch_size)

    def max_tokens(self, row: PreferencePair) -> int:
        """Return the number of tokens of both documents; each includes the prompt."""
        return 2 * len(row.prompt) + len(row.chosen) + len(row.rejected)

    def form(self, rows: Sequence[PreferencePair], seed: int) -> TokenBatch:
        """Return the pairs, packed."""
        documents = [Document(pair.prompt, response) for pair in rows for response in (pair.chosen, pair.rejected)]
        return TokenBatch.pack(documents, unit=2)


def pair_parts(losses: Tensor, chosen: Tensor, rejected: Tensor, totals: Totals) -> LossParts:
    """Return the mean loss over the step's pairs, and metrics of both responses' rewards. Arguments: [pairs]."""
    margin, count = chosen - rejected, max(totals.items, 1)
    told = {"accuracy": (margin > 0).float(), "margin": margin, "chosen": chosen, "rejected": rejected}
    return LossParts(losses.sum() / count, {name: value.detach().sum() / count for name, value in told.items()})


def summed(micro: TokenBatch, logprobs: Tensor, *, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum over each chosen and over each rejected response, [pairs]; `mean`: the mean over its tokens."""
    found = micro.sum_by_document(torch.where(micro.response_mask, logprobs, 0.0))
    found = found / micro.response_lengths.clamp(min=1) if mean else found
    return found[0::2], found[1::2]


@final
@dataclass(frozen=True, slots=True)
class RewardModel(OverPairs):
    """A reward model over preference pairs."""

    config: RewardModelConfig

    def updates(self, step: int) -> Sequence[Update]:
        """Return the reward model's update."""
        return (Update("reward_model", PreferenceObjective),)
