"""What holds for every test: one thread before torch is imported, no clock in property tests, and both databases."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import typer.testing
from hypothesis import settings
from sqlalchemy import Connection, Engine
from typer.main import get_command

from cpu_seconds import CpuSeconds
from postgres_server import MissingError, Server
from posttrain.store import database
from ray_cluster import Cluster as RayCluster
from slurm_cluster import Cluster as SlurmCluster

settings.register_profile("posttrain", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("posttrain")

# The table of commands is read from the signatures of fifty functions: once in a process, as `posttrain` does it too.
typer.testing._get_command = functools.cache(get_command)
_invoke = typer.testing.CliRunner.invoke


def _invoked(self: typer.testing.CliRunner, *words: Any, **options: Any) -> Any:
    """`--server` and `--project` set variables for the rest of their process, which ends with its command."""
    before = {name: os.environ.get(name) for name in ("POSTTRAIN_SERVER", "POSTTRAIN_PROJECT")}
    try:
        return _invoke(self, *words, **options)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


typer.testing.CliRunner.invoke = _invoked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: at the end all other workers would wait for them."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through a million objects again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _tables_made_once() -> Iterator[None]:
    """The first SQLite ledger of this process puts its statements together; others get the tables and rows it got."""
    make_tables, made = database.make_tables, list[str]()

    def make(connection: Connection) -> None:
        if connection.dialect.name != "sqlite":
            return make_tables(connection)
        driver = connection.connection.driver_connection
        if not made:
            make_tables(connection)
            made.extend(list(driver.iterdump())[1:-1])  # without its BEGIN and COMMIT
            return None
        for statement in made:
            driver.execute(statement)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "make_tables", make)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> Iterator[None]:
    """Statements that were put together for one SQLite ledger of this process are not again for the next."""
    create, first = database.create_engine, list[Engine]()

    def shared(url: Any, **options: Any) -> Engine:
        engine = create(url, **options)
        if engine.dialect.name == "sqlite":
            if not first or first[0].dialect.server_version_info is None:  # it never connected
                first[:] = [engine]
            engine.dialect, engine._compiled_cache = first[0].dialect, first[0]._compiled_cache
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "create_engine", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def _chances_computed_once() -> Iterator[None]:
    """What a plan says of its gates' power are the same few thousand numbers in every workspace."""
    power = sys.modules.get("posttrain.decision.power")
    with pytest.MonkeyPatch.context() as patch:
        if power is not None:
            patch.setattr(power, "difference_chance", functools.lru_cache(2**17)(vars(power)["difference_chance"]))
        yield


@pytest.fixture(scope="session", autouse=True)
def _models_read_once() -> Iterator[None]:
    """A source opens a copy of what its folder was read as: reading a tiny model takes ten times as long.

    `load_model` itself, which `test_model_loading` is about, reads whenever it is called.
    """
    source = sys.modules.get("posttrain.engine.models.files")
    with pytest.MonkeyPatch.context() as patch:
        if source is not None:
            for name in ("load_model", "load_scalar_model"):
                patch.setattr(source, name, _copied(vars(source)[name]))
        yield


def _copied(load: Callable[..., Any]) -> Callable[..., Any]:
    """A function that loads each state of a folder once."""
    loaded: dict[Any, Any] = {}

    def opened(folder: Path, *, device: str = "cpu", dtype: str = "float32", **adapter: Any) -> Any:
        files = sorted(folder.rglob("*")) if folder.is_dir() else []
        if device != "cpu" or adapter.get("adapter") or sum(file.stat().st_size for file in files) > 2**22:
            return load(folder, device=device, dtype=dtype, **adapter)
        state = (
            dtype,
            tuple((str(file.relative_to(folder)), file.read_bytes() if file.is_file() else b"") for file in files),
        )
        if state not in loaded:
            while len(loaded) >= 32:
                del loaded[next(iter(loaded))]
            loaded[state] = load(folder, device=device, dtype=dtype)
        return copy.deepcopy(loaded[state])

    return opened


@pytest.fixture(scope="session", autouse=True)
def _packages_listed_once() -> Iterator[None]:
    """Which package a module is of takes a look into the records of a hundred packages, which hardly ever change."""
    listed, known = importlib.metadata.packages_distributions, dict[Any, Any]()

    def owners() -> Any:
        folders = [path for path in map(Path, sys.path) if path.is_dir()]
        state = tuple((str(folder), folder.stat().st_mtime_ns) for folder in folders)
        if state not in known:
            known.clear()
            known[state] = listed()
        return copy.deepcopy(known[state])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "packages_distributions", owners)
        yield


_FSYNC, _ON_CONNECT = os.fsync, database.Database._on_connect


@pytest.fixture(scope="session", autouse=True)
def _nobody_pulls_the_plug() -> Iterator[None]:
    """What this process writes stays in the kernel's pages, where it survives every death of a process.

    A disk that is asked to keep it takes a fifth of a control test's CPU time, and as long again. What goes to the disk
    when, `test_store_fsync_order` and `test_store_durability` see by `os.fsync`; processes that tests start do ask it.
    """

    def kept(handle: int) -> None:
        os.fstat(handle)  # one that was closed is refused, as by the disk

    def connected(self: database.Database, connection: Any, record: Any) -> None:
        _ON_CONNECT(self, connection, record)
        connection.execute("PRAGMA synchronous = OFF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", kept)
        patch.setattr(database.Database, "_on_connect", connected)
        yield


@pytest.fixture
def durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is asked to keep what this test writes, as in production."""
    monkeypatch.setattr(os, "fsync", _FSYNC)
    monkeypatch.setattr(database.Database, "_on_connect", _ON_CONNECT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--ledger postgresql` runs the control suite on a PostgreSQL of its own; `--cpu 100` tells what tests cost."""
    parser.addoption("--ledger", choices=("sqlite", "postgresql"), default="sqlite")
    parser.addoption("--cpu", type=int, default=0, metavar="N", help="print the N tests that take most CPU seconds")
    parser.addoption("--cpu-file", metavar="FILE", help="write what each test took: CPU seconds, seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(config))


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


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayCluster]:
    """A Ray cluster of two nodes."""
    with RayCluster() as cluster:
        yield cluster


@pytest.fixture
def ray_cluster(ray_nodes: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """The cluster, whose token clients of this process have; Ray keeps the first token that a process uses."""
    from ray._raylet import AuthenticationTokenLoader

    for name, value in ray_nodes.environment.items():
        monkeypatch.setenv(name, value)
    AuthenticationTokenLoader.instance().reset_cache()
    yield ray_nodes
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes."""
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, which the commands of this process find."""
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def ledger_at(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a ledger can be made, with nothing there: once in SQLite, once in PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    return str(request.getfixturevalue("postgres_ledger"))
