"""The control plane on a virtual clock: whatever dies, freezes, answers late or not at all, its promises hold.

One day is among the fast tests, nineteen more among the slow ones. `make chaos` tries 200; SEED=7 make chaos tries
one, and prints its history when it fails. On every other day jobs run on the nodes of a cluster, which reach only the
object store.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest
from sim_cluster import ClusterDay
from sim_day import Day, Simulation, chosen_seeds, simulate

SHORTEST = 1  # the day that takes least, which is among the fast tests
CHOSEN = any(os.environ.get(name) for name in ("SEED", "SEEDS"))  # by a person, who wants all of them


@functools.cache
def day(seed: int, kind: type[Simulation] = Simulation) -> Day:
    """One day, simulated once."""
    with tempfile.TemporaryDirectory() as folder:
        return simulate(seed, Path(folder), kind)


@pytest.mark.parametrize("kind", [Simulation, ClusterDay])
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if CHOSEN or seed == SHORTEST else pytest.mark.slow) for seed in chosen_seeds(20)],
)
def test_a_day_keeps_every_promise(seed: int, kind: type[Simulation]) -> None:
    assert day(seed, kind).counts["runs"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Simulation, ClusterDay])
def test_a_seed_is_a_whole_history(kind: type[Simulation], tmp_path: Path) -> None:
    assert simulate(SHORTEST, tmp_path, kind) == day(SHORTEST, kind)
