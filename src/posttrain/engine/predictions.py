"""What models are asked to predict, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from posttrain.domain.errors import InputError

# topk fills a wide column; candidates are what a model says of the tokens in the wide column of that name
Need = Literal["logprobs", "entropy", "values", "scores", "topk", "candidates"]
CANDIDATES: Final = "candidates"


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What a model says of a batch: of all that it was asked for, and of nothing else."""

    logprobs: Tensor | None = None  # [T] float32: of the response tokens, at the sampling temperature; 0 elsewhere
    entropy: Tensor | None = None  # [T] float32: nats of the distribution that each response token was drawn from
    values: Tensor | None = None  # [T] float32: V before each response token
    scores: Tensor | None = None  # [D] float32: a scalar head after each document's last token
    candidates: Tensor | None = None  # [R, k] float32: log-probabilities of the tokens in the column of that name

    def of(self, need: Need) -> Tensor:
        """One of them.

        Raises:
            InputError: it was not asked for, or is `topk`, which is a wide column's alone.
        """
        found: Tensor | None = getattr(self, need, None)
        if found is None:
            raise InputError(f"the model must predict {need} for this loss, got none; name it in the objective's needs")
        return found
