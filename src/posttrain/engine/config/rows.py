"""What is trained on rows as they are."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from posttrain.engine.config.training import TrainingConfig
from posttrain.engine.settings import Rows, Tokens


class RowsConfig(TrainingConfig):
    """A stage that reads demonstrations or pairs."""

    per_step: ClassVar[str] = "batch_size"
    reads: ClassVar[Literal["demonstrations", "pairs"]] = "demonstrations"
    dropout: ClassVar[bool] = True  # while learning, as the model's own configuration has it
    batch_size: Rows = 64  # rows per optimiser step
    max_length: Tokens | None = None  # tokens of a prompt with its response; None: the model's context. Never cut

    @property
    def documents(self) -> int:
        """Of one optimiser step."""
        return self.batch_size * (2 if self.reads == "pairs" else 1)


class SFTConfig(RowsConfig):
    """Supervised fine-tuning on prompt + completion (or messages) rows; loss on completion tokens, token mean."""

    selects_by: ClassVar[str] = "probe/loss"
    lower_is_better: ClassVar[bool] = True


class RewardModelConfig(RowsConfig):
    """A scalar reward model from preference pairs (Bradley-Terry), saved as a sequence classifier of one label."""

    reads: ClassVar[Literal["demonstrations", "pairs"]] = "pairs"

    def roles(self) -> tuple[str, ...]:
        """The model of one label."""
        return ("reward_model",)


class DPOConfig(RowsConfig):
    """Direct preference optimisation on pairs, against the frozen starting policy."""

    reads: ClassVar[Literal["demonstrations", "pairs"]] = "pairs"
    dropout: ClassVar[bool] = False  # a ratio against a reference that has none
    beta: float = Field(default=0.1, gt=0, le=1e4)  # how dear it is to leave the reference
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)  # share of the pairs that are labelled the wrong way

    def roles(self) -> tuple[str, ...]:
        """The policy, and what it began as."""
        return ("policy", "reference")
