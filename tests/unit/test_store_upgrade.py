"""A workspace that the Posttrain of before made, with its runs, a run under way and a job running, is upgraded."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.app import workspace as rooms
from posttrain.control.owners import process_name
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.audit import verify_rows
from posttrain.store.schema import SCHEMA_VERSION
from posttrain.store.sealer import verify_chain

MADE = Path(__file__).parent / "fixtures" / "workspace-0001.tar.gz"  # three runs, a rollback, `held` under way
LINEAGES = Path(__file__).parent / "fixtures" / "lineages-0001.json"  # as the Posttrain before edges printed them
SECOND = MADE.with_name("workspace-0002.tar.gz")  # the same, by the last commit that had schema 0002
HELD, FIRST = "held-669de2d6", "sort-4d49a10e"
HELD_SECOND = "held-ljgyz2wp"
OLD_EVENTS = 143


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    with tarfile.open(MADE) as archive:
        archive.extractall(tmp_path, filter="data")
    return make_world(tmp_path, monkeypatch)


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    with tarfile.open(SECOND) as archive:
        archive.extractall(tmp_path, filter="data")
    return make_world(tmp_path, monkeypatch)


def ledger_bytes(world: World) -> bytes:
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as connection:
        return "\n".join(connection.iterdump()).encode()


def test_an_older_ledger_is_not_touched_by_any_other_command(old: World) -> None:
    before = ledger_bytes(old)
    for words in (("ls",), ("run", "run.yaml"), ("get", "prod"), ("init",)):
        refused = old(*words)
        assert (refused.exit_code, refused.stderr.count("\n")) == (10, 1), words
        assert f"has schema 0001, this Posttrain needs {SCHEMA_VERSION}; run `posttrain upgrade`" in refused.stderr
    assert ledger_bytes(old) == before


def test_runs_lineage_and_proofs_still_hold(old: World) -> None:
    before = ledger_bytes(old)
    done = old.json("upgrade")
    assert (done["came_from"], done["schema"], done["runs"], done["events"]) == ("0001", SCHEMA_VERSION, 4, OLD_EVENTS)
    kept = Path(done["copy"])
    assert kept.parent == old.root / ".posttrain"
    assert kept.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(kept)) as copy:
        assert "\n".join(copy.iterdump()).encode() == before
    assert [run["id"] for run in old.json("ls")["runs"]] == [HELD, "sort-88370d53", "sort-ffd12110", FIRST]
    assert "everything matches" in old.ok("verify", "prod")
    assert [entry["action"] for entry in old.json("get", "prod")["history"]] == ["promote", "promote", "rollback"]
    assert {entry["actor"] for entry in old.json("get", "prod")["history"]} == {"user:ada"}
    assert "dataset:train@1" in old.ok("lineage", "prod")
    channel = old.json("get", "prod")
    assert (channel["live"], channel["policy"], channel["frozen"]) == (channel["history"][-1]["model_digest"], None, "")
    assert [(row["role"], row["release_sequence"]) for row in channel["deployments"]] == [("live", 3)]
    assert old.json("upgrade")["copy"] == ""  # nothing to do
    workspace = rooms.open_workspace()
    assert verify_chain(workspace.ledger).before == OLD_EVENTS
    assert verify_rows(workspace.ledger) > 30
    workspace.close()


def test_lineages_are_what_they_were_before_there_were_edges(old: World) -> None:
    old.ok("upgrade")
    kept = json.loads(LINEAGES.read_text())
    assert len(kept) == 10
    assert {target: older(old.json("lineage", target)) for target in kept} == kept


def older(node: dict[str, Any]) -> dict[str, Any]:
    """A lineage without what was added since: verdicts, and of runs their gate reports and releases."""
    added = {"gate", "report", "release"} if node["kind"] == "run" else {"gate"}
    return node | {"children": [older(one) for one in node["children"] if one["kind"] not in added]}


def test_what_was_under_way_goes_on_and_what_was_done_is_known(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old.ok("upgrade")
    workspace = rooms.open_workspace()
    held, done = workspace.ledger.run(HELD), workspace.ledger.stages(FIRST)[0]
    cached = workspace.ledger.cached_stage(done.cache_key or "")
    assert cached is not None
    assert (cached.name, cached.outputs) == (done.name, done.outputs)
    locked = workspace.stores.manifest(held).code["native"]
    monkeypatch.setattr(NativeTrainer, "code_digest", lambda self: locked)  # sources have changed since
    assert "release rejected; channel prod" in old("attach", HELD).stdout  # it made what was rolled back there
    assert old.json("get", HELD)["reason"] == "Quarantined"
    (barred,) = old.json("get", "prod")["quarantine"]
    old.ok("promote", HELD, "--lift-quarantine", "a mistake")
    assert old.json("get", "prod")["live"] == barred["model_digest"]
    assert [run.id for run in workspace.ledger.runs(manifest_digest=held.manifest_digest)] == [HELD]
    workspace.close()


def test_a_report_of_before_promotes_only_where_it_is_surely_current(old: World) -> None:
    """Its first release is live again: the report of the second compared with it, and nobody can say at which time."""
    old.ok("upgrade")
    history = old.json("get", "prod")["history"]
    assert history[0]["model_digest"] == history[2]["model_digest"]
    refused = old("promote", history[1]["run_id"])
    assert (refused.exit_code, refused.stderr.count("\n")) == (9, 1)
    assert "which channel prod held 2 times, and the report does not say at which release" in refused.stderr
    assert "judge again: posttrain run RUN.yaml --again" in refused.stderr


def test_a_changed_event_of_before_is_found_afterwards(old: World) -> None:
    old.ok("upgrade")
    with closing(sqlite3.connect(old.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute("UPDATE events_before SET actor = 'user:eve' WHERE sequence = 7")
    refused = old("verify", "prod")
    assert "event log of before the upgrade is broken at sequence 7" in refused.stdout + refused.stderr
    with closing(sqlite3.connect(old.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute("DELETE FROM events_before")
        connection.execute("DELETE FROM chain_head")
    refused = old("verify", "prod")
    assert "the events of before the upgrade are not those that it names" in refused.stdout + refused.stderr


def test_a_ledger_whose_log_does_not_hold_is_not_upgraded(old: World) -> None:
    with closing(sqlite3.connect(old.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute("UPDATE events SET actor = 'user:eve' WHERE sequence = 7")
    before = ledger_bytes(old)
    refused = old("upgrade")
    assert "broken at sequence 7" in refused.stderr
    assert ledger_bytes(old) == before


def test_a_driver_of_the_older_version_is_waited_for(old: World) -> None:
    mine = process_name()
    with closing(sqlite3.connect(old.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute("UPDATE runs SET lease_owner = ?, lease_expires = 9e9 WHERE id = ?", (mine, HELD))
    refused = old("upgrade")
    assert f"run {HELD}: is being driven by {mine}, an older Posttrain" in refused.stderr
    assert not list((old.root / ".posttrain").glob("ledger-*"))
    with closing(sqlite3.connect(old.root / ".posttrain" / "ledger.db")) as connection, connection:
        dead = mine.rsplit(":", 2)[0] + ":1:1.00"
        connection.execute("UPDATE runs SET lease_owner = ? WHERE id = ?", (dead, HELD))
    assert old.json("upgrade")["runs"] == 4


@pytest.mark.parametrize("place", ["upgrade.after_copy", "upgrade.before_commit"])
def test_an_upgrade_killed_in_the_middle_is_made_again(old: World, place: str) -> None:
    before = ledger_bytes(old)
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": place, "POSTTRAIN_WORKSPACE": str(old.root / ".posttrain")}
    died = subprocess.run([sys.executable, "-m", "posttrain", "upgrade"], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert ledger_bytes(old) == before
    done = json.loads(old.ok("upgrade", "-o", "json"))
    assert Path(done["copy"]).name == "ledger-0001-2.db"
    assert "everything matches" in old.ok("verify", "prod")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "UPDATE releases SET model_digest = 'sha256:x' WHERE sequence = 3",
            "release 3 of channel prod: model must be",
        ),
        ("UPDATE stages SET tokens = 7 WHERE name = 'sft'", "/sft: tokens must be 400"),
        ("UPDATE stages SET metrics = '{}' WHERE name = 'evaluate'", "/evaluate: metrics must be"),
        ("UPDATE attempts SET seconds = 90.5", "/1: seconds must be"),
        ("UPDATE assets SET meta = 'x' WHERE kind = 'reward'", "asset reward:sort@1: cannot be read"),
        ("DELETE FROM releases WHERE sequence = 3", "release 3 of channel prod: an event tells of it, but it is gone"),
    ],
)
def test_rows_that_the_old_events_do_not_tell_are_not_made_the_truth(old: World, statement: str, words: str) -> None:
    with closing(sqlite3.connect(old.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute(statement)
    before = ledger_bytes(old)
    refused = old("upgrade")
    assert (refused.exit_code, refused.stderr.count("\n")) == (8, 1)
    assert words in refused.stderr
    assert ledger_bytes(old) == before
    assert not list((old.root / ".posttrain").glob("ledger-*"))


def test_a_ledger_of_0002_keeps_its_log(second: World) -> None:
    before = ledger_bytes(second)
    for words in (("ls",), ("get", "prod")):
        refused = second(*words)
        assert (refused.exit_code, refused.stderr.count("\n")) == (10, 1), words
        assert f"has schema 0002, this Posttrain needs {SCHEMA_VERSION}; run `posttrain upgrade`" in refused.stderr
    done = second.json("upgrade")
    assert (done["came_from"], done["schema"], done["runs"], done["events"]) == ("0002", SCHEMA_VERSION, 3, 0)
    with closing(sqlite3.connect(done["copy"])) as copy:
        assert "\n".join(copy.iterdump()).encode() == before
    workspace = rooms.open_workspace()
    assert verify_chain(workspace.ledger).sealed == 122
    assert [event.kind for event in workspace.ledger.events() if event.subject == "ledger"][-1:] == ["ledger.upgraded"]
    workspace.close()
    assert "everything matches" in second.ok("verify", "prod")
    assert [entry["action"] for entry in second.json("get", "prod")["history"]] == ["promote", "promote", "rollback"]
    assert second.json("upgrade")["copy"] == ""


def test_a_run_of_0002_goes_on_after_the_upgrade(second: World, monkeypatch: pytest.MonkeyPatch) -> None:
    second.ok("upgrade")
    workspace = rooms.open_workspace()
    locked = workspace.stores.manifest(workspace.ledger.run(HELD_SECOND)).code["native"]
    workspace.close()
    monkeypatch.setattr(NativeTrainer, "code_digest", lambda self: locked)  # sources have changed since
    second("attach", HELD_SECOND)
    assert second.json("get", HELD_SECOND)["state"] in ("succeeded", "rejected")
    assert "everything matches" in second.ok("verify", HELD_SECOND)


def test_a_driver_of_0002_goes_on_through_the_upgrade(second: World) -> None:
    """Only tables are added, so what it writes afterwards is what it wrote before."""
    held = sqlite3.connect(second.root / ".posttrain" / "ledger.db", isolation_level=None)
    alive = ("UPDATE work SET lease_owner = ?, lease_until = 9e9", (process_name(),))
    held.execute(*alive)
    second.ok("upgrade")
    assert held.execute("SELECT lease_owner FROM work").fetchall()[0] == (process_name(),)
    held.execute("UPDATE work SET lease_owner = NULL, lease_until = NULL")
    held.close()
    assert "everything matches" in second.ok("verify", "prod")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE stages SET tokens = 7 WHERE name = 'sft'", "/sft: tokens must be 400"),
        ("UPDATE events SET at = 1 WHERE id = 9", "event log is broken at sequence 9"),
    ],
)
def test_a_ledger_of_0002_that_does_not_hold_is_not_upgraded(second: World, statement: str, words: str) -> None:
    with closing(sqlite3.connect(second.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute(statement)
    before = ledger_bytes(second)
    refused = second("upgrade")
    assert (refused.exit_code, refused.stderr.count("\n")) == (8, 1)
    assert words in refused.stderr
    assert ledger_bytes(second) == before
    assert not list((second.root / ".posttrain").glob("ledger-*"))


@pytest.mark.parametrize("place", ["upgrade.after_copy", "upgrade.before_commit"])
def test_an_upgrade_from_0002_killed_in_the_middle_is_made_again(second: World, place: str) -> None:
    before = ledger_bytes(second)
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": place, "POSTTRAIN_WORKSPACE": str(second.root / ".posttrain")}
    died = subprocess.run([sys.executable, "-m", "posttrain", "upgrade"], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert ledger_bytes(second) == before
    assert Path(second.json("upgrade")["copy"]).name == "ledger-0002-2.db"
    assert "everything matches" in second.ok("verify", "prod")
