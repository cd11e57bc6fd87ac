"""How far sampling runs ahead of training, and what is done about it."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.domain.validation import Frozen


class LagConfig(Frozen):
    """Sampling runs ahead of training by so many steps, in pools of their own (exact lag: `pacing.admission`).

    With 0 steps a step trains what it sampled, anywhere, and the correction is of what rollout and training compute
    differently with the same weights: in bfloat16, or in an engine of others.
    """

    steps: Annotated[int, Field(ge=0, le=64)] = 1  # that the policy which sampled is behind the one that is trained
    # what is done about it, arXiv 2505.24298: tis weighs a token by min(π at the step's beginning / π that sampled,
    # cap), decoupled by that ratio itself; bypass takes the policy that sampled for the old one
    correction: Literal["tis", "decoupled", "bypass"] = "tis"
    cap: float | None = Field(default=None, gt=0, le=1e6)  # of tis; None: 2.0

    @model_validator(mode="after")
    def _cap_is_of_tis(self) -> Self:
        if self.cap is not None and self.correction != "tis":
            raise ValueError(f"cap belongs to correction: tis, got cap {self.cap:g} with {self.correction}; drop it")
        return self

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.steps and self.correction == "bypass":
            raise ValueError(
                "lag.steps 0 is there to correct, got correction: bypass; take tis or decoupled, or no lag"
            )
        return self

    @property
    def truncation(self) -> float | None:
        """What the weights of tokens are capped at; None: they are not weighed."""
        if self.correction == "bypass":
            return None
        return math.inf if self.correction == "decoupled" else 2.0 if self.cap is None else self.cap
