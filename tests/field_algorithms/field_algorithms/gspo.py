"""`kind: my_gspo`: the fields of GSPO (arXiv 2507.18071)."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from posttrain.domain.kinds import algorithm_kind
from posttrain.engine.config import KLConfig, OnPolicyConfig


class GSPOConfig(OnPolicyConfig):
    """A policy gradient over groups, with the paper's narrow clip of a response's ratio."""

    not_streamable: ClassVar[str] = ""
    group_size: int = Field(default=8, ge=2, le=10**6)
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0, le=1e6)
    kl: KLConfig | None = None

    @model_validator(mode="after")
    def _one_ratio(self) -> Self:
        if self.lag and self.lag.correction != "bypass":
            raise ValueError(f"lag.correction must be bypass with one ratio a response, got {self.lag.correction}")
        return self


MY_GSPO = algorithm_kind("my_gspo", "field_algorithms.gspo:GSPOConfig", "field_algorithms.gspo_algorithm:GSPO")
