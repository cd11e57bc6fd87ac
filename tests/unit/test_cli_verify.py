"""`verify` without a target: what every channel serves, each thing hashed once, and the event log."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from cli_world import World, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.ship()
    return made


def test_nothing_need_be_named(world: World) -> None:
    prod = world.json("verify", "prod")
    world.write("run.yaml", (world.root / "run.yaml").read_text().replace("channel: prod", "channel: beta"))
    world.ok("run", "run.yaml")
    beta = world.json("verify", "beta")
    said = world.ok("verify")
    assert said.startswith("channels beta, prod: hashed ")
    assert "everything matches" in said
    both = world.json("verify")
    assert (both["ok"], both["channels"], both["problems"]) == (True, ["beta", "prod"], [])
    assert max(prod["bytes"], beta["bytes"]) < both["bytes"] < prod["bytes"] + beta["bytes"], "what both have, once"
    assert world.json("verify", "prod")["channels"] == []


def test_a_workspace_that_released_nothing_has_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    said = world.ok("verify")
    assert "no channel has a release: hashed 0 artifacts again" in said
    assert "everything matches" in said
    found = world.json("verify")
    assert (found["channels"], found["checked"]) == ([], 0)
    assert found["events"] > 4


def test_what_does_not_match_is_found_wherever_it_is_served(world: World) -> None:
    with sqlite3.connect(world.root / ".posttrain" / "ledger.db") as ledger:
        ledger.execute("UPDATE stages SET metrics = '{}' WHERE name = 'evaluate'")
    result = world("verify")
    assert result.exit_code == 8
    assert "stage" in result.stderr
    assert world("verify", "-o", "json").exit_code == 8
    reward = world.json("asset", "get", "reward:sort")["digest"].removeprefix("sha256:")
    blob = world.root / ".posttrain" / "blobs" / "sha256" / reward[:2] / reward[2:]
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes().replace(b"1.0", b"9.0"))
    result = world("verify")
    assert result.exit_code == 8
    assert "2 problem(s), the first: reward reward:sort@1" in result.stderr
