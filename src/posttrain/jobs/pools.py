"""Where a training stage's roles run: the composition root that names the back-ends of worker groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from posttrain.domain.errors import InputError
from posttrain.engine.config import (
    DataflowConfig,
    InferenceRuntimeConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)

if TYPE_CHECKING:
    from posttrain.engine.groups.recording import Recorder
    from posttrain.engine.recipes.opening import PoolOf


def settled_device(runtime: InferenceRuntimeConfig) -> str:
    """The device that `auto` means in this process, which from now on uses as many threads as the stage says."""
    import torch

    torch.set_num_threads(runtime.threads)
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def open_pools(config: TrainingConfig, recorder: Recorder) -> Iterator[PoolOf]:
    """The pools of a stage's placement: this process alone where one rank is enough, else Ray actors.

    Raises:
        InputError: the cluster cannot hold the placement.
        InfrastructureError: no cluster could be reached or started.
    """
    from posttrain.engine.groups.backends.inline import InlineBackend
    from posttrain.engine.groups.pool import ResourcePool

    device = settled_device(config.runtime)
    if config.placement.is_inline and not config.runtime.ray_address:
        with ResourcePool(InlineBackend(device=device), recorder) as pool:
            yield lambda role: pool
        return
    raise InputError(
        "placement over several processes needs the Ray back-end, which this version lacks; use collocated"
    )


def roles_of(config: TrainingConfig) -> tuple[str, ...]:
    """The roles of a stage that live in pools."""
    if isinstance(config, SFTConfig):
        return ("policy",)
    if isinstance(config, RewardModelConfig):
        return ("reward_model",)
    roles = ["policy", "rollout"]
    if not isinstance(config, DataflowConfig) and config.kl:
        roles.append("reference")
    if isinstance(config, PPOConfig):
        roles += ["critic", *(["reward_model"] if config.reward_model else [])]
    return tuple(roles)
