"""Pools of Ray actors on this machine, for measurements of dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.engine.groups.cluster import open_cluster
from posttrain.engine.groups.worker_group import ResourcePool


@contextmanager
def ray_pools() -> Iterator[Callable[[int], ResourcePool]]:
    """Start a local cluster; yield a function that opens a pool of n ranks in it. Ranks reserve no cores."""
    with open_cluster(cpus=1) as cluster:
        yield lambda ranks: ResourcePool(cluster.backend(f"ranks-{ranks}", ranks, cpus=0, start_seconds=300.0))
