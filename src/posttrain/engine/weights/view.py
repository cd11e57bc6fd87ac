"""Views of the policy's weights for those who only read them.

`alias`     the reader looks at the trained parameters where they are: nothing moves, 0 extra bytes; only unsharded
            weights, only in the policy's own process, only between updates.
`gathered`  the reader has a copy; every publication gathers the shards, carries them past the controller and proves by
            digest that they arrived; extra bytes: one whole model per reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from posttrain.domain.errors import IntegrityError


@final
@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A state of the policy: `PolicyVersion(incarnation=0, step=12, digest="sha256:…")`.

    A restart from a checkpoint raises the incarnation: a version that was rolled back is not taken for its successor.
    """

    incarnation: int = 0
    step: int = 0  # optimiser steps of the stage completed
    digest: str = ""  # of the weights; empty where they are not copied

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Whole weights by name, tied ones once, on the CPU; empty on ranks that do not publish."""

    version: PolicyVersion
    tensors: Mapping[str, Tensor]


def fingerprint(module: nn.Module) -> str:
    """`sha256:…` of a module's parameters and buffers: names, types, shapes and bytes."""
    return digest_tensors(dict(named_weights(module)))


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """`sha256:…` of tensors by name, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        flat: Any = value.reshape(-1).view(torch.uint8).numpy()
        digest.update(flat)
    return "sha256:" + digest.hexdigest()


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name, tied ones once: what training changes. Not copies."""
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()


@torch.no_grad()
def load_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into a module in place, in the module's own precision.

    Raises:
        IntegrityError: names or shapes are not the module's.
    """
    own = dict(named_weights(module))
    wanted = {name: tuple(value.shape) for name, value in own.items()}
    given = {name: tuple(value.shape) for name, value in tensors.items()}
    if wanted != given:
        odd = min(set(wanted.items()) ^ set(given.items()))[0]
        raise IntegrityError(f"published weights must fit the reader's model, got a mismatch at {odd}; check the roles")
    for name, value in own.items():
        value.copy_(tensors[name])
