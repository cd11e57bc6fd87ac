"""Where a training stage's roles run: the composition root that names the back-ends of worker groups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from posttrain.domain.errors import InputError
from posttrain.domain.facts import Note
from posttrain.engine.assembly import PoolOf
from posttrain.engine.config import TrainingConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.cluster import open_cluster
from posttrain.engine.groups.pool import DEADLINES, Deadlines, ResourcePool
from posttrain.engine.groups.recording import Recorder
from posttrain.engine.settings import InferenceRuntimeConfig
from posttrain.pacing.balancing import TOKENS, CostModel
from posttrain.planner.feasibility import infeasible

_SEQUENCE_PARALLEL = frozenset({"policy", "critic", "reward_model"})  # roles whose ranks can share one batch's tokens

_ALONE = frozenset({"rollout", "reference", "teacher"})  # roles whose ranks never communicate, in any stage


def settled_device(runtime: InferenceRuntimeConfig) -> str:
    """The device that `auto` means in this process, which from now on uses as many threads as the stage says."""
    torch.set_num_threads(runtime.threads)
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def open_pools(config: TrainingConfig, recorder: Recorder, costs: CostModel = TOKENS) -> Iterator[PoolOf]:
    """The pools of a stage's placement: this process alone where one rank is enough, else Ray actors.

    Args:
        config: the stage.
        recorder: of the groups' calls.
        costs: of a document; batches are split over ranks by it.

    Raises:
        InputError: the cluster cannot hold the placement.
        InfrastructureError: no cluster could be reached or started.
    """
    device = settled_device(config.runtime)
    pools = config.placement.pools(roles_of(config)).values()
    alone = len(pools) == 1 and all(pool.resources.rank_count == 1 for pool in pools)
    if alone and not config.runtime.ray_address:
        with ResourcePool(InlineBackend(device=device), recorder, costs=costs, deadlines=_deadlines(config)) as pool:
            yield lambda role: pool
        return
    with ExitStack() as stack:
        opened = _open_cluster_pools(config, recorder, costs, stack)
        yield lambda role: opened[role]


def _open_cluster_pools(
    config: TrainingConfig, recorder: Recorder, costs: CostModel, stack: ExitStack
) -> dict[str, ResourcePool]:
    """Role → its pool of Ray processes. All pools are asked of the cluster before the first one is made."""
    roles, address = roles_of(config), config.runtime.ray_address
    pools = config.placement.pools(roles)
    ranks = ", ".join(f"{name} ({pool.resources.rank_count})" for name, pool in pools.items())
    to = f"asking the Ray cluster at {address}" if address else "starting Ray on this machine"
    recorder.sink(Note(f"{to} for the ranks of {ranks}; each loads its packages, which may take a minute", time.time()))
    cpus = sum(pool.resources.cpus or 0 for pool in pools.values())
    store = config.runtime.object_store
    size = None if store == "auto" else store
    cluster = stack.enter_context(open_cluster(address, cpus=None if address else max(cpus, 1), store_bytes=size))
    lines = infeasible(config.placement, cluster.resources(), roles=roles, where="the Ray cluster")
    if lines:
        raise InputError("; ".join(lines))
    opened: dict[str, ResourcePool] = {}
    deadlines = _deadlines(config)
    for name, pool in pools.items():
        wanted = pool.resources
        # frozen roles and decoders take whole sequences, each rank its own
        shared = config.runtime.sequence_parallel if set(pool.roles) & _SEQUENCE_PARALLEL else 1
        backend = cluster.backend(
            name,
            wanted.rank_count,
            cpus=wanted.cpus_per_rank,
            gpus=wanted.gpus_per_rank,
            kind=wanted.kind,
            threads=config.runtime.threads,
            sequence_parallel=shared,
            start_seconds=deadlines.start,
            collective_seconds=deadlines.call / 2,  # so that it is told which collective, before the call ends
            collective=not _ALONE.issuperset(pool.roles),
        )
        made = ResourcePool(backend, recorder, costs=costs, sequence_parallel=shared, deadlines=deadlines)
        home = stack.enter_context(made)
        opened |= dict.fromkeys(pool.roles, home)
    return opened


def _deadlines(config: TrainingConfig) -> Deadlines:
    """As the stage says; what nobody settled is the pool's own."""
    start, call = config.runtime.start_timeout, config.runtime.call_timeout
    return Deadlines(
        DEADLINES.start if start == "auto" else start,
        DEADLINES.call if call == "auto" else call,
    )


def roles_of(config: TrainingConfig) -> tuple[str, ...]:
    """The roles of a stage that live in pools."""
    return tuple(role for role in config.roles() if role != "reward")
