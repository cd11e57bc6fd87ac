"""The reference: the policy as it was when the stage began, for the KL penalty."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from posttrain.engine.batch import TokenBatch
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs


class Reference:
    """A frozen copy with storage of its own. Build it before a checkpoint is restored into the model.

    Args:
        model: the starting policy.
        temperature: as the policy's.
    """

    def __init__(self, model: LanguageModel, temperature: float = 1.0) -> None:
        module = copy.deepcopy(model.module)
        self._model = adopt_module(module.requires_grad_(False))
        self._temperature = temperature

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """`[T]` float32: log-probabilities of the tokens under the reference."""
        return token_logprobs(self._model, batch, temperature=self._temperature, response_only=True)
