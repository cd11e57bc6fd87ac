"""Where a worker finds its model: a folder that every rank can read, opened in the worker's own process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from posttrain.engine.models.language_model import LanguageModel, ScalarModel
from posttrain.engine.models.loading import load_model, load_scalar_model


@final
@dataclass(frozen=True, slots=True)
class ModelSource:
    """A language model by its folder, e.g. `ModelSource(Path("…/model"), dtype="auto")`."""

    folder: Path
    dtype: str = "auto"  # auto: bfloat16 on CUDA, float32 on CPU

    def open(self, device: str) -> LanguageModel:
        """Load it.

        Raises:
            NotFoundError, InputError: see `load_model`.
        """
        return load_model(self.folder, device=device, dtype=settled_dtype(self.dtype, device))


@final
@dataclass(frozen=True, slots=True)
class ScalarSource:
    """A value or reward model by its folder; a causal language model there gets a head of zeros."""

    folder: Path
    dtype: str = "auto"

    def open(self, device: str) -> ScalarModel:
        """Load it.

        Raises:
            NotFoundError, InputError: see `load_scalar_model`.
        """
        return load_scalar_model(self.folder, device=device, dtype=settled_dtype(self.dtype, device))


def settled_dtype(dtype: str, device: str) -> str:
    """The precision that `auto` means on a device."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"
