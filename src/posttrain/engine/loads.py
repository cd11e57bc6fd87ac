"""What a stage's configuration makes of memory and devices. Torch-free: a plan and the stage's job both read it."""

from __future__ import annotations

from typing import Literal, TypeVar

from posttrain.domain.contracts import Load
from posttrain.domain.placement import Placement
from posttrain.engine.config import DistillConfig, EvaluateConfig, OnPolicyConfig, RowsConfig, SamplingConfig

DECODED_TOGETHER = 256  # rows; `rollout.port.SamplingParams.batch_size`, which a test compares
T = TypeVar("T")


def load_of(kind: str, config: object) -> Load | None:
    """What memory and devices see of a stage that trains or answers; None: of any other.

    Raises:
        InputError: a role is placed that the stage does not have.
    """
    if isinstance(config, EvaluateConfig):
        return _answering(kind, config)
    if not isinstance(config, RowsConfig | SamplingConfig):
        return None
    runtime, roles = config.runtime, config.roles()
    sampled = config if isinstance(config, SamplingConfig) else None
    lag = config.lag if isinstance(config, OnPolicyConfig) else None
    scored = sampled is not None and sampled.reward is not None
    return Load(
        kind=kind,
        roles=roles,
        placement=config.placement.for_roles(roles, config.described(kind)),
        device=runtime.device,
        dtype=runtime.dtype,
        micro_batch_tokens=_written(runtime.micro_batch_tokens),
        activation_checkpointing=_written(runtime.activation_checkpointing),
        sequence_parallel=runtime.sequence_parallel,
        documents=config.documents,
        rows=DECODED_TOGETHER if sampled else 0,
        response_tokens=sampled.response_tokens if sampled else 0,
        ray_address=runtime.ray_address,
        samples=sampled.samples if sampled else 0,
        kv_cache=_written(runtime.kv_cache),
        object_store=_written(runtime.object_store),
        reward_timeout=_written(sampled.reward_timeout) if sampled and scored else None,
        start_timeout=_written(runtime.start_timeout),
        call_timeout=_written(runtime.call_timeout),
        scored=scored,
        lag=lag.steps if lag else 0,
        correction=lag.correction if lag and lag.correction != "bypass" else "",
        streams=isinstance(config, OnPolicyConfig) and config.stream_gradients,
        wide=config.wide if isinstance(config, DistillConfig) else 0,
    )


def _answering(kind: str, config: EvaluateConfig) -> Load:
    """An evaluation is a rollout alone."""
    runtime, suites = config.runtime, config.suites.values()
    return Load(
        kind=kind,
        roles=("rollout",),
        placement=Placement(),
        device=runtime.device,
        dtype=runtime.dtype,
        micro_batch_tokens=None,
        rows=DECODED_TOGETHER,
        response_tokens=max(suite.max_new_tokens for suite in suites),
        kv_cache=_written(runtime.kv_cache),
    )


def _written(value: T | Literal["auto"]) -> T | None:
    return None if value == "auto" else value
