"""Room for a pool in a Ray cluster: one bundle of resources per rank, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from posttrain.domain.errors import InfrastructureError, InputError

_ACCELERATOR = "accelerator_type:"
_TRACE = 0.001  # Ray's own amount for "a node with this accelerator"; also of CPUs where none are reserved
_PREFIX = "posttrain-"


@final
@dataclass(frozen=True, slots=True)
class RankResources:
    """What one rank gets: `RankResources(cpus=4, gpus=1, kind="h100")`."""

    cpus: float = 1.0  # 0: none are reserved
    gpus: float = 0.0
    kind: str | None = None  # of accelerator, as Ray names it, in any case of letters

    def bundle(self, offered: Mapping[str, float]) -> dict[str, float]:
        """As Ray counts it; `offered` tells how the cluster writes the accelerator."""
        wanted = {"CPU": float(self.cpus) or _TRACE}
        if self.gpus:
            wanted["GPU"] = float(self.gpus)
        if self.kind:
            name = f"{_ACCELERATOR}{self.kind.upper()}"
            wanted[next((key for key in offered if key.casefold() == name.casefold()), name)] = _TRACE
        return wanted


def reserve(pool: str, ranks: int, resources: RankResources, seconds: float) -> Any:
    """A placement group with one bundle per rank, close together where the cluster can.

    Raises:
        InputError: the cluster could not hold the pool even if it were empty; nothing was created.
        InfrastructureError: it is too full, and stayed so for `seconds`.
    """
    offered = ray.cluster_resources()
    bundle = resources.bundle(offered)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(key, 0.0) / amount + 1e-9) for key, amount in bundle.items()) for node in nodes)
    if room < ranks:
        raise InputError(
            f"pool {pool} must fit its Ray cluster, asks for {ranks} ranks of {_words(bundle)}; the cluster has "
            f"{_words({key: offered.get(key, 0.0) for key in bundle})} on {len(nodes)} nodes, room for {room}; "
            "ask for less or add nodes"
        )
    group = placement_group([bundle] * ranks, strategy="PACK", name=_PREFIX + pool)
    if not group.wait(seconds):
        free = ray.available_resources()
        remove_placement_group(group)
        raise InfrastructureError(
            f"pool {pool} must get {ranks} ranks of {_words(bundle)} within {seconds:g} seconds, free are "
            f"{_words({key: free.get(key, 0.0) for key in bundle})}; in the way: {_holders(group)}; "
            "wait until it ends, or ask for less"
        )
    return group


def _holders(own: Any) -> str:
    """The placement groups that hold resources now; other work in the cluster has no name to give."""
    groups = placement_group_table().values()
    names = [g["name"] or g["placement_group_id"] for g in groups if g["state"] == "CREATED"]
    return ", ".join(sorted(name.removeprefix(_PREFIX) for name in names)) or "other work in the cluster"


def _words(amounts: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {key}" for key, amount in amounts.items())
