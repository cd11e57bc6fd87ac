"""What is trained to say what a teacher says."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.engine.config.sampling import SamplingConfig, TraceConfig
from posttrain.engine.settings import MOST_ROWS, Rows, Word


class DistillConfig(SamplingConfig):
    """Distillation on the student's own responses (arXiv 2306.13649). No reward is needed; one that is given is told,
    and trains nothing.
    """

    group_size: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 1  # samples per prompt; nothing compares them
    teacher: Word  # the model that is learnt from; frozen, with the student's tokenizer
    # of the teacher's likeliest tokens at every place; the others are one outcome together. 64 hold nearly all of the
    # probability, at 512 bytes for a token
    top_k: Annotated[int, Field(ge=1, le=10**6)] = 64
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float | None = Field(default=None, gt=0, lt=1)  # of jsd, the teacher's share of the mixture; None: 0.5
    mini_batches: Rows = 1  # optimiser steps per rollout batch
    trace: TraceConfig = TraceConfig()

    @model_validator(mode="after")
    def _beta_is_of_jsd(self) -> Self:
        if self.beta is not None and self.divergence != "jsd":
            raise ValueError(f"beta belongs to divergence: jsd, got beta {self.beta:g} with {self.divergence}; drop it")
        return self

    @property
    def documents(self) -> int:
        """Of one optimiser step, at the most."""
        return -(-self.samples // self.mini_batches)

    @property
    def wide(self) -> int:
        """Bytes of the teacher's tokens for each token of a response: ids and log-probabilities of four each."""
        return 8 * self.top_k

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return super().inputs() | {"teacher": ("model", self.teacher)}

    def roles(self) -> tuple[str, ...]:
        """And a teacher."""
        policy, *others = super().roles()
        return (policy, "teacher", *others)
