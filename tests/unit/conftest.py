"""Fixtures that several unit test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import control_bench
import pytest
from control_bench import Bench, evaluate, train
from power_cut import Disk

from postgres_server import Server
from posttrain.store.database import Database
from posttrain.store.sealer import seal, verify_chain


@pytest.fixture(scope="session")
def _empty_ledger(postgres: Server) -> str:
    """A database with the tables of a ledger, to copy: they take longer to make."""
    address = postgres.create()
    Database(address).close()
    return address


@pytest.fixture(autouse=True)
def _benches_in_postgres(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--ledger postgresql`, each bench has a database of its own in a real server."""
    if request.config.getoption("--ledger") != "postgresql":
        yield
        return
    server, empty, made = (
        request.getfixturevalue("postgres"),
        request.getfixturevalue("_empty_ledger"),
        dict[Path, str](),
    )

    def place(root: Path) -> str:
        if root not in made:
            made[root] = server.create(like=empty)
        return made[root]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_bench, "ledger_place", place)
        yield
    for address in made.values():
        server.drop(address)


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
