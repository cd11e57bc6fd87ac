"""What a stage's configuration makes of memory and devices. Torch-free: a plan and the stage's job both read it."""

from __future__ import annotations

from typing import Literal, TypeVar

from posttrain.domain.contracts import Load
from posttrain.domain.placement import Placement
from posttrain.engine.config import (
    DataflowConfig,
    EvaluateConfig,
    GRPOConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)

DECODED_TOGETHER = 256  # rows; `rollout.port.SamplingParams.batch_size`, which a test compares
T = TypeVar("T")


def load_of(config: object) -> Load | None:
    """What memory and devices see of a stage that trains or answers; None: of any other.

    Raises:
        InputError: a role is placed that the stage does not have.
    """
    if isinstance(config, EvaluateConfig):
        return _answering(config)
    if not isinstance(config, TrainingConfig):
        return None
    runtime, samples, longest, timeout = config.runtime, 0, 0, None
    if isinstance(config, GRPOConfig | PPOConfig | DataflowConfig):
        samples, longest = config.prompts_per_step * config.group_size, config.max_new_tokens
        documents = samples if isinstance(config, DataflowConfig) else -(-samples // config.mini_batches)
        timeout = _written(config.reward_timeout)
    else:
        documents = config.batch_size * (2 if isinstance(config, RewardModelConfig) else 1)
    roles = _roles(config)
    scored = getattr(config, "reward", None) is not None
    return Load(
        kind=config.kind,
        roles=roles,
        placement=config.placement.for_roles(roles, _described(config)),
        device=runtime.device,
        dtype=runtime.dtype,
        micro_batch_tokens=_written(runtime.micro_batch_tokens),
        activation_checkpointing=_written(runtime.activation_checkpointing),
        sequence_parallel=runtime.sequence_parallel,
        documents=documents,
        rows=min(samples, DECODED_TOGETHER),
        response_tokens=longest,
        ray_address=runtime.ray_address,
        samples=samples,
        kv_cache=_written(runtime.kv_cache),
        object_store=_written(runtime.object_store),
        reward_timeout=timeout if scored else None,
        scored=scored,
    )


def _answering(config: EvaluateConfig) -> Load:
    """An evaluation is a rollout alone."""
    runtime, suites = config.runtime, config.suites.values()
    return Load(
        kind=config.kind,
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


def _roles(config: TrainingConfig) -> tuple[str, ...]:
    if isinstance(config, RewardModelConfig):
        return ("reward_model",)
    if isinstance(config, SFTConfig):
        return ("policy",)
    if isinstance(config, DataflowConfig):
        return ("policy", "rollout", *(["reward"] if config.reward else []))
    reference = ("reference",) if config.kl else ()
    if isinstance(config, GRPOConfig):
        return ("policy", *reference, "rollout", "reward")
    judge = "reward" if config.reward else "reward_model"
    return ("policy", "critic", *reference, "rollout", judge)


def _described(config: TrainingConfig) -> str:
    """The stage in an error: what its configuration leaves out decides which roles it has."""
    words = [config.kind]
    if isinstance(config, PPOConfig):
        words.append("with a reward function" if config.reward else "with a reward model")
    if isinstance(config, GRPOConfig | PPOConfig) and config.kl is None:
        words.append("without kl")
    return " ".join(words)
