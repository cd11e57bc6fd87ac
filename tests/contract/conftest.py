"""Fixtures that several contract suites share."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reward_bench import PATIENCE, Opener

from posttrain.sandbox.process import ProcessReward, open_reward

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # its scripted world


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Where a reward's source, dedented, is written."""

    def _write(source: str) -> Path:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source))
        return path

    return _write


@pytest.fixture
def opened(write: Callable[[str], Path]) -> Iterator[Opener]:
    """Opens a reward from its source; all are closed at the end."""
    held: list[ProcessReward] = []

    def _open(source: str, entry: str | None = None, timeout: float = PATIENCE, dialect: str = "auto") -> ProcessReward:
        held.append(open_reward(write(source), entry, timeout=timeout, dialect=dialect, name="reward:mine@1"))
        return held[-1]

    yield _open
    for reward in held:
        reward.close()
