"""What a job makes of the sizes that its stage leaves to it: chosen once, before anything is opened, and told.

The choice is `planner.sizes`' alone, from what this machine has: a plan made here chose the same.
"""

from __future__ import annotations

import json
import time
from typing import Any

from posttrain.domain.facts import Metric
from posttrain.domain.placement import NAMED_MODELS
from posttrain.engine.config import EvaluateConfig, SamplingConfig, TrainingConfig
from posttrain.engine.loads import load_of
from posttrain.execution.machine import room_of, this_machine
from posttrain.jobs.bodies.pools import settled_device
from posttrain.jobs.entry import Job
from posttrain.planner.residency import Shape
from posttrain.planner.sizes import Room, Settled, settle


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
