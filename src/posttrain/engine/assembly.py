"""Starts the roles that a stage needs, in the given pools."""

from collections.abc import Callable, Sequence

from posttrain.engine.config import PPOConfig, RowsConfig, SamplingConfig, TrainingConfig
from posttrain.engine.groups.worker_group import ResourcePool, WorkerGroup
from posttrain.engine.loop.publication import Roles
from posttrain.engine.models.files import ModelSource, ScalarSource
from posttrain.engine.models.language_model import LanguageModel, ScalarModel
from posttrain.engine.models.logprobs import Model
from posttrain.engine.roles.learner import micro_batch_tokens
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.port import RolloutEngine
from posttrain.engine.rollout.worker import RolloutWorker

PoolOf = Callable[[str], ResourcePool]  # role → the pool that runs it
Source = ModelSource | ScalarSource | Model


def open_learner(config: RowsConfig, model: Source, seed: int, pool_of: PoolOf) -> Roles:
    """Start the roles of an algorithm that reads rows: the learner and, if the algorithm has one, the reference."""
    role, *others = config.roles()
    learner = pool_of(role).start(
        role,
        TrainWorker,
        model,
        config.optimizer,
        config.runtime,
        name=role,
        steps=config.steps,
        seed=seed,
        dropout=config.dropout,
    )
    frozen = {}
    if "reference" in others:
        tokens = micro_batch_tokens(config.runtime, pool_of(role).processes[0].device)
        pool = pool_of("reference").by_rank()
        frozen["reference"] = pool.start("reference", FrozenWorker, model, micro_batch_tokens=tokens)
    return Roles({role: learner}, frozen, sleeps=_sleeps(config, pool_of))


def open_roles(
    config: SamplingConfig,
    model: ModelSource | LanguageModel,
    seed: int,
    pool_of: PoolOf,
    *,
    critic: ScalarSource | ScalarModel | None = None,
    reward_model: ScalarSource | ScalarModel | None = None,
    teacher: ModelSource | LanguageModel | None = None,
    engine: RolloutEngine | None = None,
    stop: Sequence[str] = (),
) -> Roles:
    """Start the roles of an algorithm that samples.

    The policy starts first, because a rollout in the policy's pool reads the policy's weights.

    Args:
        model: the starting policy, and the reference if the algorithm has a KL penalty.
        critic: the starting value model.
        reward_model: the model that scores responses; None: no model scores them.
        teacher: the model that the policy learns from; None: no teacher.
        engine: a rollout engine in the controller's process; None: an engine that reads the policy's weights.
        stop: strings that end a response; if any are given, each rollout rank opens the tokenizer.
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
    learners = {"policy": policy}
    source = model if isinstance(model, ModelSource) else None
    cache = None if config.runtime.kv_cache == "auto" else config.runtime.kv_cache
    home = pool_of("rollout").by_rank()
    rollout = home.start(
        "rollout", RolloutWorker, source, engine, kv_cache=cache, reads_text=bool(stop), patience=home.deadlines.call
    )
    if critic is not None and isinstance(config, PPOConfig):
        learners["critic"] = pool_of("critic").start(
            "critic",
            TrainWorker,
            critic,
            config.critic.optimizer,
            config.runtime,
            name="critic",
            steps=config.steps,
            seed=seed,
        )
    tokens = micro_batch_tokens(config.runtime, pool_of("policy").processes[0].device)
    frozen = _open_frozen(config, model, reward_model, teacher, policy, pool_of, tokens)
    return Roles(learners, frozen, rollout, sleeps=_sleeps(config, pool_of), micro_batch_tokens=tokens)


def _open_frozen(
    config: SamplingConfig,
    model: ModelSource | LanguageModel,
    reward_model: ScalarSource | ScalarModel | None,
    teacher: ModelSource | LanguageModel | None,
    policy: WorkerGroup[TrainWorker],
    pool_of: PoolOf,
    tokens: int,
) -> dict[str, WorkerGroup[FrozenWorker]]:
    """Start the frozen roles: the reference of a KL penalty, the reward model, and the teacher.

    The teacher predicts tokens of the policy's vocabulary at the policy's temperature.
    """
    frozen, warmth = dict[str, WorkerGroup[FrozenWorker]](), config.temperature
    if "reference" in config.roles():
        pool = pool_of("reference").by_rank()
        frozen["reference"] = pool.start(
            "reference", FrozenWorker, model, micro_batch_tokens=tokens, temperature=warmth
        )
    if reward_model is not None:
        pool = pool_of("reward_model").by_rank()
        frozen["reward_model"] = pool.start(
            "reward_model", FrozenWorker, reward_model, name="reward_model", micro_batch_tokens=tokens
        )
    if teacher is not None:
        pool = pool_of("teacher").by_rank()
        frozen["teacher"] = pool.start(
            "teacher",
            FrozenWorker,
            teacher,
            name="teacher",
            temperature=warmth,
            micro_batch_tokens=tokens,
            vocabulary=policy.one(TrainWorker.vocabulary),
        )
    return frozen


def _sleeps(config: TrainingConfig, pool_of: PoolOf) -> bool:
    nap = config.placement.sleep
    return pool_of(config.roles()[0]).processes[0].device.startswith("cuda") if nap == "auto" else bool(nap)
