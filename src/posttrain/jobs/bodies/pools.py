"""Where a training stage's roles run: the composition root that names the back-ends of worker groups.

What a job makes of the sizes that its stage leaves to it: chosen once, before anything is opened, and told.

The choice is `planner.sizes`' alone, from what this machine has: a plan made here chose the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from posttrain.domain.errors import InputError
from posttrain.domain.facts import Metric, Note
from posttrain.domain.placement import NAMED_MODELS
from posttrain.engine.assembly import PoolOf
from posttrain.engine.config import EvaluateConfig, SamplingConfig, TrainingConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.cluster import open_cluster
from posttrain.engine.groups.pool import DEADLINES, Deadlines, ResourcePool
from posttrain.engine.groups.recording import Recorder
from posttrain.engine.loads import load_of
from posttrain.engine.settings import InferenceRuntimeConfig
from posttrain.execution.machine import room_of, this_machine
from posttrain.jobs.entry import Job
from posttrain.pacing.balancing import TOKENS, CostModel
from posttrain.planner.feasibility import infeasible
from posttrain.planner.residency import Shape
from posttrain.planner.sizes import Room, Settled, settle

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


def settled(job: Job, config: TrainingConfig) -> tuple[TrainingConfig, dict[str, float]]:
    """The stage's configuration with every size settled, which the job's facts tell; and the metrics `sizes/NAME`."""
    found = choose(job, config)
    load, runtime = found.load, config.runtime
    chosen: dict[str, Any] = {"activation_checkpointing": bool(load.activation_checkpointing)}
    for name in ("micro_batch_tokens", "kv_cache", "object_store", "start_timeout", "call_timeout"):
        if getattr(load, name) is not None:
            chosen[name] = getattr(load, name)
    changes: dict[str, Any] = {"runtime": runtime.model_copy(update=chosen)}
    if isinstance(config, SamplingConfig) and load.reward_timeout is not None:
        changes["reward_timeout"] = load.reward_timeout
    return config.model_copy(update=changes), tell_sizes(job, found)


def tell_sizes(job: Job, found: Settled) -> dict[str, float]:
    """Say what was settled, in the log with its arithmetic; the metrics."""
    metrics = {f"sizes/{name}": value for name, value in found.values().items()}
    job.sink(Metric(0, metrics, time.time()))
    for size in found.sizes:
        print(f"{size.name}: {size.said}" + (f" ({size.why})" if size.chosen else ", as written"))
    return metrics


def choose(job: Job, config: TrainingConfig | EvaluateConfig) -> Settled:
    """What `planner.sizes` makes of this machine."""
    load = load_of(job.order.kind, config)
    assert load is not None
    room = Room() if load.ray_address is not None else room_of(this_machine())
    if room.gpu_there and settled_device(config.runtime) != "cuda":  # torch does not see what the machine has
        room = Room(memory=room.memory)
    shapes = {role: shape for role in load.roles if (shape := _shape(job, role)) is not None}
    return settle(load, shapes, room)


def _shape(job: Job, role: str) -> Shape | None:
    if role == "reward":
        return None
    slot = role if role in NAMED_MODELS and role in job.order.inputs else "model"
    folder = job.input(slot)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # whoever opens the model says what is wrong with it
        return None
    if not isinstance(config, dict):
        return None
    return Shape.of_files(config, sum(path.stat().st_size for path in folder.glob("*.safetensors")))
