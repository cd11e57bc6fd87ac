"""Can a placement be had at all? Asked before anything starts, of the machine or of a cluster. Pure arithmetic.

What is there comes in the form in which Ray counts a cluster's resources::

    {"CPU": 32.0, "GPU": 8.0, "accelerator_type:H100": 1.0}

`accelerator_type:…` says that some node has devices of this kind, not how many; so of a kind only its presence can be
checked, and of GPUs the number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from posttrain.domain.contracts import Load
from posttrain.domain.placement import MAIN, ROLES, Placement, Pool
from posttrain.planner.residency import Peak, Shape

ACCELERATOR = "accelerator_type:"  # prefix of Ray's names of kinds
_SHARED = ("policy", "critic", "reference", "reward_model")  # roles whose ranks can share one batch's tokens


def infeasible(
    placement: Placement,
    available: Mapping[str, float],
    *,
    roles: Collection[str] = ROLES,
    where: str = "this machine",
) -> list[str]:
    """Why these pools cannot be started, one line each; empty: they can.

    Args:
        available: resources in all, in Ray's form; what is in use at the moment counts as there.
        roles: of the stage.
        where: what the lines call the place.
    """
    pools = placement.pools(roles).values()
    if placement.is_inline and not any(pool.resources.gpus or pool.resources.cpus for pool in pools):
        return []  # the process that is there anyway
    found = [line for pool in pools for line in _kind_is_missing(pool, available, where)]
    for name, noun in (("GPU", "gpus"), ("CPU", "cpus")):
        asked = {pool.name: _amount(pool, noun) for pool in pools}
        there = available.get(name, 0.0)
        total = sum(asked.values())
        if total > there:
            names = [pool for pool, amount in asked.items() if amount]
            several = len(names) > 1
            parts = f" ({', '.join(f'{pool} {asked[pool]}' for pool in names)})" if several else ""
            found.append(
                f"placement: {' and '.join(map(_called, names))} {'ask' if several else 'asks'} for {total} {noun}"
                f"{parts}, {where} has {there:g}; {_next_action(noun, several)}"
            )
    return found


def unfit(load: Load, shape: Shape | None) -> list[str]:
    """Why ranks cannot do this stage's work on this model, one line each.

    Args:
        load: the stage.
        shape: of the policy's model (or of the only one); None: not known, so heads are not checked.
    """
    found: list[str] = []
    parallel = load.sequence_parallel
    for pool in load.placement.pools(load.roles).values():
        ranks, names = pool.ranks, [role for role in pool.roles if role in _SHARED]
        if names and pool.resources.gpus_per_rank > 1:
            found.append(
                f"placement: {_called(pool.name)} has {pool.resources.gpus} gpus for {ranks} ranks, but a rank of "
                f"{names[0]} drives one device; leave ranks out, or ask for {ranks} gpus"
            )
        if names and parallel > 1 and ranks % parallel:
            found.append(
                f"runtime.sequence_parallel must divide the ranks of {_called(pool.name)} ({ranks}), got {parallel}; "
                f"change it or placement's ranks"
            )
    if shape is not None and parallel > 1 and shape.heads % parallel:
        found.append(
            f"runtime.sequence_parallel must divide the model's {shape.heads} attention heads, got {parallel}; "
            "choose a divisor"
        )
    elif shape is not None and parallel > 1 and shape.kv_heads % parallel and parallel % shape.kv_heads:
        found.append(
            f"runtime.sequence_parallel must divide the model's {shape.kv_heads} key-value heads or be a multiple of "
            f"them, got {parallel}; choose another"
        )
    return found


def too_large(peaks: Collection[Peak], *, device: int | None, machine: int | None) -> list[str]:
    """Why the certain part of what is resident cannot fit, one line each. Estimates refuse nothing.

    Args:
        peaks: of one stage.
        device: bytes of one GPU; None: not known.
        machine: bytes of memory in which all ranks on CPUs live; None: not known, or several machines.
    """
    found = [
        f"memory: one rank of {_called(peak.pool)} needs at least {gib(peak.certain)} on its GPU, "
        f"it has {gib(device)}; use more ranks, or give roles pools of their own"
        for peak in peaks
        if device is not None and peak.device == "cuda" and peak.certain > device
    ]
    on_cpu = [peak for peak in peaks if peak.device == "cpu"]
    total = sum(peak.certain * peak.ranks for peak in on_cpu)
    if machine is not None and total > machine:
        parts = ", ".join(f"{peak.pool} {peak.ranks} × {gib(peak.certain)}" for peak in on_cpu)
        found.append(
            f"memory: ranks on CPUs need at least {gib(total)} ({parts}), this machine has {gib(machine)}; "
            "use a smaller model, or GPUs"
        )
    return found


def gib(size: int) -> str:
    """`1.5 GiB`, `12 MiB`, `29 TiB`."""
    if size >= 2**43:
        return f"{size / 2**40:.0f} TiB"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{max(size, 2**20 if size else 0) / 2**20:.0f} MiB"


def _amount(pool: Pool, noun: str) -> int:
    return pool.resources.gpus if noun == "gpus" else pool.resources.cpus_per_rank * pool.ranks


def _called(pool: str) -> str:
    return "collocated" if pool == MAIN else pool


def _kind_is_missing(pool: Pool, available: Mapping[str, float], where: str) -> Iterator[str]:
    kind = pool.resources.kind
    there = sorted(name.removeprefix(ACCELERATOR).lower() for name in available if name.startswith(ACCELERATOR))
    if kind is not None and kind not in there and available.get("GPU", 0.0) > 0:
        has = ", ".join(there) or "GPUs of no known kind"
        yield (
            f"placement: {_called(pool.name)} asks for {pool.resources.gpus} gpus of kind {kind}, {where} has {has}; "
            "change kind or leave it out"
        )


def _next_action(noun: str, several: bool) -> str:
    if noun == "gpus":
        return "ask for fewer, or name a cluster with runtime.ray_address"
    return "ask for fewer, or put roles together with {with: policy}" if several else "ask for fewer"
