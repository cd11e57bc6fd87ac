"""Reward-model training: a scalar that ranks the chosen response above the rejected one (Bradley-Terry).

Source: InstructGPT, arXiv 2203.02155, eq. 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from posttrain.engine.algorithms.objectives import PreferenceObjective
from posttrain.engine.batch import Document, Provenance, TokenBatch
from posttrain.engine.config import RewardModelConfig
from posttrain.engine.recipes.algorithm import RowDefaults, RowSource, Update


class Preference(Protocol):
    """A rendered preference row, as tokens."""

    @property
    def prompt(self) -> Sequence[int]:
        """What both responses answer."""

    @property
    def chosen(self) -> Sequence[int]:
        """The better response, end of sequence included."""

    @property
    def rejected(self) -> Sequence[int]:
        """The worse one."""


@final
@dataclass(frozen=True, slots=True)
class RewardModel(RowDefaults):
    """Over preference pairs."""

    config: RewardModelConfig

    @property
    def source(self) -> RowSource:
        """Pairs of a step."""
        return RowSource(self.config.batch_size)

    def max_tokens(self, row: Preference) -> int:
        """The prompt is read with each response."""
        return 2 * len(row.prompt) + len(row.chosen) + len(row.rejected)

    def form(self, rows: Sequence[Preference], seed: int) -> TokenBatch:
        """See `paired`."""
        return paired(rows, Provenance())

    def updates(self, step: int) -> Sequence[Update]:
        """The reward model."""
        return (Update("reward_model", PreferenceObjective),)


def paired(pairs: Sequence[Preference], provenance: Provenance) -> TokenBatch:
    """Pairs, packed: the chosen and the rejected response of each are one unit, in turn."""
    documents = [Document(p.prompt, response) for p in pairs for response in (p.chosen, p.rejected)]
    return TokenBatch.pack(documents, provenance=provenance, unit=2)
