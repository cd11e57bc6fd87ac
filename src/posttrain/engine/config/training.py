"""What every kind of training is given: how long it is, what is measured meanwhile, where and how it computes."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from posttrain.domain.placement import Placement
from posttrain.domain.validation import Frozen
from posttrain.engine.settings import (
    EarlyStoppingConfig,
    LossProbeConfig,
    OptimizerConfig,
    Passes,
    Positive,
    RuntimeConfig,
    Word,
)


class TrainingConfig(Frozen):
    """A training stage. `epochs` needs the rows, so a plan turns it into `steps`, which jobs read.

    Batches go on over the end of a pass, so N passes are the least number of steps that take N × rows documents.
    """

    per_step: ClassVar[str]  # the field that says how many documents a step takes
    more_passes: ClassVar[str] = ""  # what an error adds where `epochs` was another word before
    selects_by: ClassVar[str] = "probe/accuracy"  # the probe's metric
    lower_is_better: ClassVar[bool] = False

    steps: Positive = 0  # optimiser steps, or rollout batches; 0: not known before `epochs` is held against the rows
    epochs: Passes | None = None  # passes over the data
    model: Word = "base"
    data: Word
    probe: LossProbeConfig | None = None  # a held-out measurement while it trains; None: none
    early_stopping: EarlyStoppingConfig | None = None  # ends the stage when its probe stops improving; None: never
    keep_best: bool = False  # the best model by the probe, as a second output of the stage
    optimizer: OptimizerConfig = OptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: Placement = Placement()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps > 0) == (self.epochs is not None):
            given = "both" if self.steps else "neither"
            raise ValueError(f"exactly one of steps and epochs must be given, got {given}{self.more_passes}")
        return self

    @model_validator(mode="after")
    def _selects_by_a_probe(self) -> Self:
        asked = [name for name in ("early_stopping", "keep_best") if getattr(self, name)]
        if asked and self.probe is None:
            raise ValueError(f"{asked[0]} needs a probe to go by, got none; add probe: {{data: NAME}}")
        return self

    def probes(self) -> dict[str, tuple[str, str]]:
        """The probe's data as an input."""
        return {"probe": ("dataset", self.probe.data)} if self.probe else {}

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return {"model": ("model", self.model), "data": ("dataset", self.data)} | self.probes()

    def roles(self) -> tuple[str, ...]:
        """Those that the stage has; the first is the model that it leaves."""
        return ("policy",)

    def described(self, kind: str) -> str:
        """The stage in an error about its roles: what its configuration leaves out decides which it has."""
        return kind
