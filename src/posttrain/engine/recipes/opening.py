"""Starting the roles that a stage needs, in whatever pools they are given."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.engine.config import DataflowConfig, GRPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from posttrain.engine.groups.pool import ResourcePool
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.predicting import Model
from posttrain.engine.models.scalar_model import ScalarModel
from posttrain.engine.models.source import ModelSource, ScalarSource
from posttrain.engine.recipes.roles import LearnerOnly, Roles
from posttrain.engine.roles.frozen import FrozenWorker
from posttrain.engine.roles.learner import micro_batch_tokens
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.port import RolloutEngine
from posttrain.engine.rollout.worker import RolloutWorker

PoolOf = Callable[[str], ResourcePool]  # role → the pool it lives in
Source = ModelSource | ScalarSource | Model


def open_learner(
    config: SFTConfig | RewardModelConfig, model: Source, seed: int, pool_of: PoolOf, role: str
) -> LearnerOnly:
    """The role of plain training: the policy on demonstrations, a reward model on preferences."""
    return LearnerOnly(
        pool_of(role).start(
            role,
            TrainWorker,
            model,
            config.optimizer,
            config.runtime,
            name=role,
            steps=config.steps,
            seed=seed,
            dropout=True,
        )
    )


def open_roles(
    config: GRPOConfig | PPOConfig | DataflowConfig,
    model: ModelSource | LanguageModel,
    seed: int,
    pool_of: PoolOf,
    *,
    critic: ScalarSource | ScalarModel | None = None,
    reward_model: ScalarSource | ScalarModel | None = None,
    engine: RolloutEngine | None = None,
) -> Roles:
    """The roles of an on-policy recipe; the policy first, because a rollout beside it reads its weights.

    Args:
        model: the starting policy; also the reference, where the recipe has a KL penalty.
        critic: what the value model begins with.
        reward_model: where responses are scored by a model.
        engine: a rollout engine to use instead of one over the policy's weights, in the controller's process.
    """
    policy = pool_of("policy").start(
        "policy",
        TrainWorker,
        model,
        config.optimizer,
        config.runtime,
        steps=config.steps,
        seed=seed,
        temperature=config.temperature,
        first=config.critic.warmup if isinstance(config, PPOConfig) else 0,
    )
    source = model if isinstance(model, ModelSource) else None
    rollout = pool_of("rollout").by_rank().start("rollout", RolloutWorker, source, engine)
    tokens = micro_batch_tokens(config.runtime, pool_of("policy").processes[0].device)
    reference: WorkerGroup[FrozenWorker] | None = None
    if isinstance(config, GRPOConfig | PPOConfig) and config.kl:
        reference = (
            pool_of("reference")
            .by_rank()
            .start("reference", FrozenWorker, model, temperature=config.temperature, micro_batch_tokens=tokens)
        )
    values: WorkerGroup[TrainWorker] | None = None
    if critic is not None and isinstance(config, PPOConfig):
        values = pool_of("critic").start(
            "critic",
            TrainWorker,
            critic,
            config.critic.optimizer,
            config.runtime,
            name="critic",
            steps=config.steps,
            seed=seed,
        )
    judge: WorkerGroup[FrozenWorker] | None = None
    if reward_model is not None:
        judge = (
            pool_of("reward_model")
            .by_rank()
            .start("reward_model", FrozenWorker, reward_model, name="reward_model", micro_batch_tokens=tokens)
        )
    nap = config.placement.sleep
    on_gpu = pool_of("policy").processes[0].device.startswith("cuda")
    return Roles(policy, rollout, reference, values, judge, sleeps=on_gpu if nap == "auto" else bool(nap))
