"""Everybody asks everything, valid or not: no answer is a 5xx, another one than was declared, or tells too much."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interface_walk import ROLES, SECRET, Planted, Walk, plant
from server_bench import ServerBench, served

from posttrain.app.workspace import init_workspace
from posttrain.domain.ids import Role
from posttrain.workspace.served import PLACE

SIGNED_BY = "canary-of-a-sink-0123456789"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        yield made


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Planted]]:
    """The address of `posttrain serve` with its driver and workers, and what its workspace has."""
    monkeypatch.setenv(SECRET, SIGNED_BY)
    workspace = init_workspace(tmp_path)
    planted = plant(workspace, tmp_path)
    root = workspace.root
    workspace.close()
    log = (tmp_path / "serve.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", "serve", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=log,
        env=dict(os.environ),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"serving")
        first = process.stdout.readline().split()[-1].decode()
        said = json.loads((root / PLACE).read_text())
        planted.secrets += [first, said["key"], SIGNED_BY]
        yield said["url"], planted
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        log.close()
    told = (tmp_path / "serve.log").read_text()
    assert "Traceback" not in told, told[-4000:]
    assert not [word for word in planted.secrets[1:] if word in told]


@pytest.mark.slow
def test_a_round_of_everything(bench: ServerBench, tmp_path: Path) -> None:
    walk = Walk(bench.url, plant(bench.workspace, tmp_path), 1)
    assert walk.everywhere(Role.ADMIN) > 80


@pytest.mark.slow
def test_no_role_is_told_too_much_and_none_meets_a_bug(real: tuple[str, Planted]) -> None:
    url, planted = real
    walk = Walk(url, planted, 5)
    assert walk.everywhere(None, shown=False) > 250
    for role in ROLES:
        assert walk.everywhere(role) > 250, role
