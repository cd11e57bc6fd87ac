"""Which state of the policy a reader has, and what was found of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from posttrain.engine.weights.attestation import Attestation

View = Literal["alias", "neighbour", "copy"]
"""How a rollout reads the policy's weights:

`alias`      where they are: nothing moves; only unsharded weights, only in the policy's own process.
`neighbour`  a copy, in the same processes as the policy's shards: buckets go from rank to rank of their process group.
`copy`       a copy, in processes of its own: buckets go there through the object store, past the controller.
"""


@final
@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A state of the policy: `PolicyVersion(incarnation=0, step=12)`.

    A restart from a checkpoint raises the incarnation: a version that was rolled back is not taken for its successor.
    """

    incarnation: int = 0
    step: int = 0  # optimiser steps of the stage completed

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank of the rollout decodes with, as its engine found it."""

    found: Attestation
    before: str | None  # the version that it served before; None: weights that nobody published
    changed: bool  # since then
