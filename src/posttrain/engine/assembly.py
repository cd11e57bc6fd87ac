"""Starts the roles that a stage needs, in the given pools."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from posttrain.domain.roles import ROLLOUT, RoleSpec
from posttrain.engine.config import RowsConfig, SamplingConfig, TrainingConfig
from posttrain.engine.groups.worker_group import ResourcePool, WorkerGroup
from posttrain.engine.loop.publication import Roles
from posttrain.engine.models.files import ModelSource, ScalarSource
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.logprobs import Model
from posttrain.engine.roles.learner import micro_batch_tokens
from posttrain.engine.roles.remote import RemoteSource
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.port import RolloutEngine
from posttrain.engine.rollout.worker import RolloutWorker

PoolOf = Callable[[str], ResourcePool]  # role → the pool that runs it
Source = ModelSource | ScalarSource | Model
FrozenSource = Source | RemoteSource


def open_learner(config: RowsConfig, model: Source, seed: int, pool_of: PoolOf) -> Roles:
    """Start the roles of an algorithm that reads rows: the learner and, if the algorithm has one, the reference."""
    role, *others = config.roles()
    learner = _learner(config, role, model, seed, pool_of, dropout=config.dropout)
    tokens = micro_batch_tokens(config.runtime, pool_of(role.name).processes[0].device)
    shard = config.runtime.shard_frozen is True
    recalled = {one.name: learner for one in others if config.recalls(one)}
    frozen = {
        one.name: pool_of(one.name)
        .by_rank()
        .start(one.name, FrozenWorker, model, micro_batch_tokens=tokens, shard=shard)
        for one in others
        if one.name not in recalled
    }
    return Roles({role.name: learner}, frozen, recalled=recalled, sleeps=_sleeps(config, pool_of))


def open_roles(
    config: SamplingConfig,
    model: ModelSource | LanguageModel,
    seed: int,
    pool_of: PoolOf,
    *,
    sources: Mapping[str, FrozenSource] = MappingProxyType({}),
    engine: RolloutEngine | None = None,
    stop: Sequence[str] = (),
) -> Roles:
    """Start the roles of an algorithm that samples.

    The policy starts first, because a rollout in the policy's pool reads the policy's weights.

    Args:
        model: the starting policy, and the initial model of each role that is not in `sources`.
        sources: role → its initial model.
        engine: a rollout engine in the controller's process; None: `config.rollout.engine`.
        stop: strings that end a response; if any are given, each rollout rank opens the tokenizer.
    """
    learners: dict[str, WorkerGroup[TrainWorker]] = {}
    policy, *others = (role for role in config.roles() if role.model or role.url)
    opened: dict[str, FrozenSource] = {role.name: sources.get(role.name, model) for role in others}
    learners["policy"] = _learner(config, policy, model, seed, pool_of, temperature=config.temperature)
    folder = model if isinstance(model, ModelSource) else None
    cache = None if config.runtime.kv_cache == "auto" else config.runtime.kv_cache
    home = pool_of("rollout").by_rank()
    rollout = home.start(
        "rollout",
        RolloutWorker,
        folder,
        engine,
        kv_cache=cache,
        reads_text=bool(stop),
        name=config.rollout.engine,
        patience=home.deadlines.call,
    )
    tokens = micro_batch_tokens(config.runtime, pool_of("policy").processes[0].device)
    frozen: dict[str, WorkerGroup[FrozenWorker]] = {}
    recalled = {role.name: learners["policy"] for role in others if config.recalls(role)}
    for role in others:
        source = opened[role.name]
        if role.trained and not isinstance(source, RemoteSource):
            learners[role.name] = _learner(config, role, source, seed, pool_of)
        elif role != ROLLOUT and role.name not in recalled:
            frozen[role.name] = _frozen(config, role, source, learners["policy"], pool_of, tokens)
    sleeps = _sleeps(config, pool_of)
    return Roles(learners, frozen, rollout, sleeps=sleeps, micro_batch_tokens=tokens, recalled=recalled)


def _learner(
    config: TrainingConfig, role: RoleSpec, model: Source, seed: int, pool_of: PoolOf, **more: Any
) -> WorkerGroup[TrainWorker]:
    """Start a role that learns."""
    optimizer, first = config.learning(role.name)
    words: dict[str, Any] = {"name": role.name, "steps": config.steps, "seed": seed, "first": first, **more}
    return pool_of(role.name).start(
        role.name, TrainWorker, model, optimizer, config.runtime, engine=config.train.engine, **words
    )


def _frozen(
    config: SamplingConfig,
    role: RoleSpec,
    model: FrozenSource,
    policy: WorkerGroup[TrainWorker],
    pool_of: PoolOf,
    tokens: int,
) -> WorkerGroup[FrozenWorker]:
    """Start a role that predicts: language models at the policy's temperature, and wide ones of its vocabulary."""
    return (
        pool_of(role.name)
        .by_rank()
        .start(
            role.name,
            FrozenWorker,
            model,
            name=role.name,
            micro_batch_tokens=tokens,
            temperature=config.temperature if role.head == "language" else 1.0,
            vocabulary=policy.one(TrainWorker.vocabulary) if role.wide else None,
            shard=config.runtime.shard_frozen is True and not role.url,
        )
    )


def _sleeps(config: TrainingConfig, pool_of: PoolOf) -> bool:
    nap = config.placement.sleep
    return pool_of(config.roles()[0].name).processes[0].device.startswith("cuda") if nap == "auto" else bool(nap)
