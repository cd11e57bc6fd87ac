"""Words are erased: from events, rows and the database's file; what happened is proved as before."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from cli_world import GOOD_REWARD, RUN, World, make_world
from sqlalchemy import select
from test_channel_policies import policy_file

from posttrain.app.workspace import open_workspace
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database
from posttrain.store.erasure import erase_subject
from posttrain.store.journal import TABLES
from posttrain.store.ledger import Ledger

WHO, SAID = "quillfeather", "whisperings"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: WHO)
    made = make_world(tmp_path, monkeypatch)
    made.prepare(by_commands=True)  # by this person
    made.write("run.yaml", RUN.replace("owner: ada", f"owner: {WHO}"))
    made.ok("asset", "add", "reward:sort", made.write("reward.py", GOOD_REWARD.replace("Exact match.", SAID)))
    return made


def in_file(world: World, word: str) -> bool:
    """Whether the word stands anywhere in the ledger's file or its log."""
    return any(word.encode() in path.read_bytes() for path in (world.root / ".posttrain").glob("ledger.db*"))


def proved(world: World) -> str:
    said = world.ok("verify", "prod")
    assert "everything matches" in said
    workspace = open_workspace()
    verify_rows(workspace.ledger)
    workspace.close()
    return said


@pytest.mark.slow
def test_a_persons_name_is_nowhere_afterwards(world: World) -> None:
    world.ok("run", "run.yaml")
    run = world.newest()
    assert in_file(world, WHO)
    assert f"owner {WHO}" in world.ok("get", run)
    done = world.json("erase", f"user:{WHO}", "--reason", "they left")
    assert done["events"] >= 2
    assert done["overwritten"]
    assert any("manifests in the store" in line for line in done["left"])
    assert not in_file(world, WHO)
    for words in (("get", run), ("ls",), ("why", run), ("lineage", "prod"), ("asset", "ls"), ("get", "prod")):
        assert WHO not in world.ok(*words), words
    assert "by erased:" in world.ok("asset", "ls")
    assert f"{done['events']} of them with erased words" in proved(world)
    assert world.json("verify", "prod")["erased"] == done["events"]
    world.write("reward.py", GOOD_REWARD)
    world.ok("asset", "add", "reward:sort", "reward.py")  # who acts again is named again, as another
    assert {row["created_by"] for row in world.json("asset", "ls")} == {f"user:{WHO}", f"erased:{done['subject']}"}
    proved(world)


def test_policies_that_name_a_person_are_told_of(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=[f"user:{WHO}", "user:ann"]))
    world.ok("channel", "set-policy", "beta", policy_file(world, approvers=["user:ann"]))
    left = world.json("erase", f"user:{WHO}", "--reason", "they left")["left"]
    (told,) = [line for line in left if "policy of channel" in line]
    assert told.startswith("the policy of channel prod, which contains the name")
    assert "posttrain channel set-policy prod POLICY.yaml" in told


@pytest.mark.slow
def test_what_was_said_of_a_run_goes_and_the_run_stays(world: World) -> None:
    world.ok("run", "run.yaml")
    run = world.newest()
    before = world.json("get", run)
    done = world.json("erase", run, "--reason", "asked for")
    after = world.json("get", run)
    for key in ("state", "reason", "name"):
        assert after[key] == before[key]
    assert [row["outputs"] for row in after["stages"]] == [row["outputs"] for row in before["stages"]]
    workspace = open_workspace()
    with workspace.ledger.database.read(across="a test") as connection:
        for name, key in (("runs", "id"), ("stages", "run_id"), ("attempts", "run_id")):
            table = TABLES[name].table
            words = TABLES[name].words - {"folder", "handle"}
            rows = connection.execute(select(table).where(table.c[key] == run)).mappings().all()
            assert rows
            assert {row[word] for row in rows for word in words} <= {"", None}, name
    workspace.close()
    assert any(str(world.root / ".posttrain" / "runs" / run) in line for line in done["left"])
    proved(world)
    again = world.json("erase", run, "--reason", "asked for once more")
    assert (again["events"], again["rows"], again["overwritten"]) == (0, 0, True)
    assert "sft says hello" in world.ok("logs", run, "sft")  # the folder is told of, not emptied
    proved(world)


def test_an_asset_loses_its_words_and_goes_on_to_be_used(world: World) -> None:
    assert in_file(world, SAID)
    world.ok("erase", "reward:sort@2", "--reason", "a quotation")
    assert not in_file(world, SAID)
    kept = world.json("asset", "get", "reward:sort@2")["meta"]
    assert kept["entry"] == "score"
    assert "guideline" not in kept
    world.ok("run", "run.yaml")
    proved(world)
    refused = world("erase", "reward:sort", "--reason", "x")
    assert (refused.exit_code, "must name a version; write reward:sort@2" in refused.stderr) == (2, True)


def test_what_cannot_be_erased_is_refused_and_nothing_changes(world: World) -> None:
    world.hold = {"sft"}
    world("run", "--timeout", "100", "run.yaml")
    run = world.newest()
    for words, said in (
        ((run, "--reason", "x"), "still writes text; stop it first"),
        ((f"user:{WHO}", "--reason", " "), "--reason must not be empty"),
        ((f"user:{WHO}", "--reason", f"{WHO} left"), "the reason must not contain"),
        (("user:nobody", "--reason", "x"), "there is no principal 'user:nobody'"),
        (("nothing", "--reason", "x"), "there is no run 'nothing'"),
    ):
        refused = world("erase", *words)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert said in refused.stderr
    assert in_file(world, WHO)


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("erase.before_commit", marks=pytest.mark.slow), "erase.after_commit"])
def test_who_dies_in_the_middle_has_erased_all_or_nothing(
    world: World, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("run", "run.yaml")
    root = world.root / ".posttrain"
    with closing(sqlite3.connect(root / "ledger.db")) as connection:
        before = list(connection.iterdump())
    command = [sys.executable, "-m", "posttrain", "erase", f"user:{WHO}", "--reason", "they left"]
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": place, "POSTTRAIN_WORKSPACE": str(root)}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    with closing(sqlite3.connect(root / "ledger.db")) as connection:
        after = list(connection.iterdump())
    assert (after == before) == (place == "erase.before_commit")
    proved(world)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "admin")
    (name,) = {row["created_by"] for row in world.json("asset", "ls")}
    assert name.startswith("erased:") == (WHO not in "\n".join(after)) == (after != before)
    world.ok("erase", name, "--reason", "they left")  # again: the file is written anew
    assert not in_file(world, WHO)
    proved(world)


def test_words_that_nobody_erased_may_not_be_gone(world: World) -> None:
    world.ok("run", "run.yaml")
    world.ok("erase", f"user:{WHO}", "--reason", "they left")
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as connection, connection:
        (first,) = connection.execute("SELECT max(event) FROM payloads").fetchone()
        connection.execute("DELETE FROM payloads WHERE event = ?", (first,))
    refused = world("verify", "prod")
    assert refused.exit_code == 8
    assert "its words are missing" in refused.stdout


def test_a_reader_of_an_older_state_is_told_of(tmp_path: Path, world: World) -> None:
    world.ok("run", "run.yaml")
    run = world.newest()
    file = world.root / ".posttrain" / "ledger.db"
    ledger = Ledger(Database(file, busy_seconds=0.2))
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runs").fetchone()
        assert not erase_subject(ledger, "user:ann", run, "asked for").overwritten
    assert erase_subject(ledger, "user:ann", run, "asked for").overwritten
    ledger.close()


@pytest.mark.slow
def test_freed_pages_keep_nothing(world: World) -> None:
    """Some builds of SQLite overwrite what they delete, others leave it where it was."""
    world.ok("run", "run.yaml")
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("CREATE TABLE scraps (said TEXT)")
        connection.executemany("INSERT INTO scraps VALUES (?)", [(f"{number} left over",) for number in range(1000)])
        connection.execute("DROP TABLE scraps")
    assert in_file(world, "left over")
    assert world.json("erase", world.newest(), "--reason", "asked for")["overwritten"]
    assert not in_file(world, "left over")
    proved(world)
