"""How long a stage waits for its workers, and what the machine holds while they load. Pure arithmetic over `residency`.

======================  ================================================================================================
start_timeout           5 min for a role's ranks to be there with their model, or 10 s for each GiB that they read
                        (100 MB/s from one disk for all), where that is more; for processes without a model as long
call_timeout            1 h for one call of a worker, and for an engine that says nothing, or 10 ms for each response
                        token that a rank samples or trains in one call, where that is more; of rows nobody counts
======================  ================================================================================================

Deadlines end what hangs: they are generous, and decide no result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from posttrain.domain.contracts import Load
from posttrain.domain.placement import Pool
from posttrain.planner.feasibility import gib
from posttrain.planner.residency import Shape, device_of, shared_weights, width_of
from posttrain.planner.size import Size

START, CALL = 300.0, 3600.0  # seconds
_READ_GIB, _TOKEN = 10.0, 0.01  # seconds
_GIB = 2**30
_TRAIN = ("policy", "critic", "reward_model")


def deadlines(load: Load, shapes: Mapping[str, Shape], *, gpu_there: bool = False) -> tuple[Size, Size]:
    """`start_timeout` and `call_timeout` of a stage."""
    return _start(load, shapes, gpu_there), _call(load)


def loading(load: Load, shapes: Mapping[str, Shape], *, gpu_there: bool = False) -> Iterator[tuple[str, int, int]]:
    """Role, ranks, and bytes of the whole model that each of them reads, one role after the other. A rollout beside a
    policy on one rank reads none.
    """
    for pool in load.placement.pools([role for role in load.roles if role != "reward"]).values():
        width = width_of(load, device_of(load, pool, gpu_there=gpu_there))
        for role in pool.roles:
            lent = role == "rollout" and shared_weights(load)
            if role in shapes and not lent:
                yield role, pool.ranks, width * shapes[role].parameters


def too_much_to_load(
    load: Load, shapes: Mapping[str, Shape], memory: int | None, *, gpu_there: bool = False
) -> list[str]:
    """Why the ranks of a role cannot load side by side, one line each.

    Ranks that compute in the type of the file read its pages, which the machine holds once and may let go. In another
    type each has a copy of its own before it goes to its GPU. On CPUs what stays is more, and held elsewhere.

    Args:
        memory: bytes of the machine on which all ranks live; None: not known, or several machines.
    """
    if memory is None:
        return []
    on_gpus = {
        role
        for pool in load.placement.pools([role for role in load.roles if role != "reward"]).values()
        if device_of(load, pool, gpu_there=gpu_there) == "cuda"
        for role in pool.roles
    }
    return [
        f"memory: {ranks} ranks of {role} convert their model side by side in this machine's memory, {ranks} × "
        f"{gib(size)}, it has {gib(memory)}; use fewer ranks on one machine, or compute in the type of its file"
        for role, ranks, size in loading(load, shapes, gpu_there=gpu_there)
        if role in on_gpus and ranks * size > memory and shapes[role].stored not in (0, size // shapes[role].parameters)
    ]


def _start(load: Load, shapes: Mapping[str, Shape], gpu_there: bool) -> Size:
    if load.start_timeout is not None:
        return Size("start_timeout", load.start_timeout, "seconds", False, "")
    read = max(loading(load, shapes, gpu_there=gpu_there), key=lambda one: one[1] * one[2], default=None)
    if read is None:
        return Size("start_timeout", START, "seconds", True, "5 min; the model's sizes are not known")
    role, ranks, size = read
    value = max(START, round(_READ_GIB * ranks * size / _GIB, 1))
    why = f"5 min, or 10 s for each GiB of {ranks} × {gib(size)} ({role}) where that is more"
    return Size("start_timeout", value, "seconds", True, why)


def _call(load: Load) -> Size:
    if load.call_timeout is not None:
        return Size("call_timeout", load.call_timeout, "seconds", False, "")
    tokens = max(_of_a_call(load), default=0)
    value = max(CALL, round(_TOKEN * tokens, 1))
    many = f", or 10 ms for each of the {tokens} tokens of a rank's longest call where that is more" if tokens else ""
    return Size("call_timeout", value, "seconds", True, f"1 h{many}")


def _of_a_call(load: Load) -> Iterator[int]:
    """Tokens of the longest call of each pool that samples or trains; prompts apart."""
    pools: Collection[Pool] = load.placement.pools(load.roles).values()
    for pool in pools:
        if "rollout" in pool.roles:
            yield -(-load.samples // pool.ranks) * load.response_tokens
        if set(pool.roles) & set(_TRAIN):
            yield -(-load.documents // pool.ranks) * load.response_tokens
