"""What holds for every test: one thread before torch is imported, no clock in property tests, and both databases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

from postgres_server import MissingError, Server

settings.register_profile("posttrain", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("posttrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--ledger postgresql` runs the control suite on a PostgreSQL of its own."""
    parser.addoption("--ledger", choices=("sqlite", "postgresql"), default="sqlite")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL for all tests of this process. It does not wait for the disk: who needs that starts their own."""
    try:
        server = Server()
    except MissingError as error:
        pytest.fail(str(error))
    with server:
        yield server


@pytest.fixture
def postgres_ledger(postgres: Server) -> Iterator[str]:
    """The address of an empty database in PostgreSQL."""
    address = postgres.create()
    yield address
    postgres.drop(address)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def ledger_at(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a ledger can be made, with nothing there: once in SQLite, once in PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    return str(request.getfixturevalue("postgres_ledger"))
