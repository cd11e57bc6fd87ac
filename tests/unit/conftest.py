"""Fixtures that several unit test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from control_bench import Bench, evaluate, train
from power_cut import Disk

from posttrain.store.sealer import seal, verify_chain


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, {"sft": [train()], "evaluate": [evaluate(190)], "baseline-evaluate": [evaluate(190)]})
    yield made
    seal(made.ledger)
    assert verify_chain(made.ledger).pending == 0  # whatever happened, the audit log holds
    made.ledger.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that is watched."""
    return Disk(monkeypatch)
