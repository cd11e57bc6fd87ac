"""What samples several responses in turn, and an algorithm of the user's own."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from posttrain.engine.config.sampling import SamplingConfig, TraceConfig
from posttrain.engine.settings import NonNegative


class TurnsConfig(SamplingConfig):
    """Several responses of one sample, between which the algorithm's `observe(row, responses)` speaks.

    An algorithm of a package that has turns puts it before the parameters that it begins with:
    `class TalkConfig(TurnsConfig, PPOConfig)`.
    """

    turns: Annotated[int, Field(ge=1, le=64)] = 1  # responses of a sample, at the most; `observe` speaks between two
    observation_tokens: NonNegative = 0  # of what is observed between two responses, at the most

    @model_validator(mode="after")
    def _turns_observe(self) -> Self:
        if (self.turns > 1) != (self.observation_tokens > 0):
            raise ValueError(
                f"turns and observation_tokens go together, got turns {self.turns} and observation_tokens "
                f"{self.observation_tokens}; set both, or neither"
            )
        return self

    @property
    def response_tokens(self) -> int:
        """Every turn and what is observed between them."""
        return self.turns * self.max_new_tokens + (self.turns - 1) * self.observation_tokens

    @property
    def turns_most(self) -> int:
        """As the stage says."""
        return self.turns

    @property
    def observed_most(self) -> int:
        """As the stage says."""
        return self.observation_tokens

    @property
    def read_again(self) -> int:
        """What came before each."""
        return sum(turn * (self.max_new_tokens + self.observation_tokens) for turn in range(1, self.turns))


class DataflowConfig(TurnsConfig):
    """An algorithm of the user's own: a class (`recipes.dataflow.Dataflow`)."""

    recipe: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(:[A-Za-z_]\w*)?$")]  # my_module:MyAlgorithm, beside run.yaml
    settings: dict[str, Any] = Field(default_factory=dict)  # for the class; nothing else reads them
    trace: TraceConfig = TraceConfig()
    tokens_per_step: Annotated[int, Field(ge=1, le=10**12)] | None = (
        None  # what a step may spend; None: each response trained on once, at the most
    )

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return super().inputs() | {"recipe": ("recipe", self.recipe)}
