"""The control plane on a virtual clock: whatever dies, freezes, answers late or not at all, its promises hold.

`make chaos` tries 200 days; SEED=7 make chaos tries one, and prints its history when it fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_day import chosen_seeds, simulate


@pytest.mark.parametrize("seed", chosen_seeds(20))
def test_a_day_keeps_every_promise(seed: int, tmp_path: Path) -> None:
    day = simulate(seed, tmp_path)
    assert day.counts["runs"] >= 1


def test_a_seed_is_a_whole_history(tmp_path: Path) -> None:
    first, second = (simulate(3, tmp_path / name) for name in ("first", "second"))
    assert first == second
