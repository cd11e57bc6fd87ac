"""`gc`: what nobody needs is deleted, whatever else happens at the same time; what is recorded is never lost."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_world import GOOD_REWARD, RUN, World, make_world

from posttrain.app import workspace as rooms
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import ConflictError
from posttrain.store import garbage
from posttrain.store.audit import verify_rows
from posttrain.store.blobs import StoredBlob, open_blobs
from posttrain.store.database import Database, SystemClock
from posttrain.store.ledger import Ledger
from posttrain.store.operations import Parts, PartStore, PendingUploads
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.trees import put_tree, verify_tree

TURNS = 15
NOW = ("gc", "--older-than", "0s")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.ship()
    return made


def stored(world: World) -> set[str]:
    return {blob.digest for blob in open_blobs(world.root / ".posttrain" / "blobs").stored()}


def everything_holds(world: World) -> None:
    """Every run, channel and version is hashed again, and the ledger is what its log tells."""
    runs = [run["id"] for run in world.json("ls")["runs"]]
    versions = [row["ref"] for row in world.json("asset", "ls")]
    for name in (*runs, *versions, *(channel["channel"] for channel in world.json("ls")["channels"])):
        assert re.search(r"everything (else )?matches", world.ok("verify", name)), name
    workspace = rooms.open_workspace()
    seal(workspace.ledger)
    assert verify_chain(workspace.ledger).pending == 0
    verify_rows(workspace.ledger)
    for digest in stored(world):
        workspace.blobs.check(digest)
    workspace.close()


@pytest.mark.slow
def test_what_is_recorded_stays_and_what_nobody_recorded_goes(world: World) -> None:
    before = stored(world)
    blobs = open_blobs(world.root / ".posttrain" / "blobs")
    lost = blobs.put(b"of a submission that was refused")
    (world.root / "dropped").mkdir()
    (world.root / "dropped" / "a.bin").write_bytes(b"a")
    tree = put_tree(blobs, world.root / "dropped")
    assert world.json("gc")["blobs"]["young"] == 3
    assert stored(world) >= before | {lost, tree}
    looked = world.json(*NOW, "--dry-run")
    assert (looked["blobs"]["deleted"], looked["blobs"]["needed"]) == (3, len(before))
    assert stored(world) >= before | {lost, tree}
    done = world.json(*NOW)
    assert (done["blobs"]["deleted"], done["blobs"]["needed"]) == (3, len(before))
    assert done["blobs"]["deleted_bytes"] == looked["blobs"]["deleted_bytes"]
    assert stored(world) == before
    everything_holds(world)
    assert world.json(*NOW)["blobs"]["deleted"] == 0
    workspace = rooms.open_workspace()
    (told,) = [event for event in workspace.ledger.events(limit=9999) if event.kind == "gc.swept"]
    assert (told.payload["blobs"], told.payload["bytes"]) == (3, done["blobs"]["deleted_bytes"])
    workspace.close()


def test_words_for_people(world: World) -> None:
    open_blobs(world.root / ".posttrain" / "blobs").put(b"left behind")
    said = world.ok("gc")
    assert "deleted 0 artifacts" in said
    assert "kept 1 artifacts that are not needed but are younger than 24h" in said
    assert "would delete 1 artifacts (0.0 MiB)" in world.ok(*NOW, "--dry-run")
    refused = world("gc", "--older-than", "a while")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "gc: --older-than must be a duration such as 90s" in refused.stderr


@pytest.mark.slow
def test_a_run_that_has_not_ended_keeps_what_it_will_read(world: World) -> None:
    world.write("next.yaml", RUN.replace("seed: 17", "seed: 18").replace("steps: 4", "steps: 5"))
    world.hold.add("grpo")
    assert world("run", "next.yaml", "--timeout", "60").exit_code == 12
    before = stored(world)
    world.json(*NOW)
    assert stored(world) == before
    world.hold.clear()
    world.ok("stop", world.newest())
    world.ok("retry", world.newest())
    assert world.json("get", world.newest())["state"] == "succeeded"
    everything_holds(world)


@pytest.mark.slow
def test_a_version_that_was_erased_goes_unless_something_else_uses_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.app.workspace.SystemClock", SystemClock)  # which the files have, too
    world.ok("asset", "add", "reward:unused", world.write("unused.py", GOOD_REWARD + "# a name\n"))
    world.ok("asset", "add", "dataset:again", world.write("again.jsonl", '{"prompt": "a", "completion": "b"}\n'))
    unused, again = world.json("asset", "get", "reward:unused@1"), world.json("asset", "get", "dataset:again@1")
    assert "which posttrain gc deletes if nothing else" in world.ok("erase", "reward:unused@1", "--reason", "asked")
    world.ok("erase", "dataset:again@1", "--reason", "asked")
    world.ok("erase", "reward:sort@1", "--reason", "asked")
    world.ok("asset", "add", "dataset:again", "again.jsonl")
    done = world.json(*NOW)
    assert done["blobs"]["deleted"] == 1
    assert unused["digest"] not in stored(world)
    assert again["digest"] in stored(world)
    assert "reward:unused@1: was erased, and its bytes deleted" in world.ok("verify", "reward:unused@1")
    everything_holds(world)
    world.ok("asset", "add", "reward:unused", "unused.py")  # it comes back
    assert unused["digest"] in stored(world)
    world.json(*NOW)
    assert unused["digest"] in stored(world)


def test_cached_copies_of_what_is_gone_go_and_checkpoints_of_runs_that_ended(world: World) -> None:
    cache = world.root / ".posttrain" / "cache"
    kept = {path.name for path in (cache / "trees").iterdir()}
    gone = cache / "trees" / ("0" * 64)
    gone.mkdir()
    (gone / "model.safetensors").write_bytes(b"x" * 1000)
    (attempt,) = (world.root / ".posttrain" / "runs" / world.newest() / "sft").glob("[0-9]*")
    (attempt / "checkpoints" / "step-00000002").mkdir(parents=True)
    (attempt / "checkpoints" / "step-00000002" / "COMMIT").write_bytes(b"y" * 500)
    assert world.json("gc")["folders"] == 0
    assert world.json(*NOW, "--dry-run")["folder_bytes"] == 1500
    done = world.json(*NOW)
    assert (done["folders"], done["folder_bytes"]) == (2, 1500)
    assert {path.name for path in (cache / "trees").iterdir()} >= kept
    assert not gone.exists()
    assert not (attempt / "checkpoints").exists()
    assert not list((cache / "scratch").glob(".gc-*"))
    everything_holds(world)


def test_uploads_that_nobody_used_go_with_the_word_that_they_are_there(world: World) -> None:
    """Else whoever asks would be told that nobody needs to send them, and then that they are missing."""
    blobs = open_blobs(world.root / ".posttrain" / "blobs")
    unused, used = blobs.put(b"uploaded, never named"), world.json("asset", "get", "model:tiny@1")["digest"]
    store, half = PartStore(blobs.url), "sha256:" + "0" * 64
    with closing(Database(world.root / ".posttrain" / "ledger.db")) as database:
        ledger = Ledger(database, clock=world.clock)
        noted, parts = PendingUploads(ledger), Parts(ledger, store)
        for digest in (unused, used):
            noted.add(digest)
        parts.add(half, 28, 0, b"the first half")
        store.put("default/nobodys", b"no row names it")
        world.ok("gc")
        assert [noted.has(digest) for digest in (unused, used)] == [True, True]
        assert (parts.sizes(half), len(store.stored())) == ({28: 14}, 2)
        assert world.json(*NOW, "--dry-run")["folders"] == 2
        assert world.json(*NOW)["blobs"]["deleted"] == 1
        assert [noted.has(digest) for digest in (unused, used)] == [False, True]
        assert (parts.sizes(half), store.stored()) == ({}, {})


def test_answers_that_nobody_asks_for_again_go(world: World) -> None:
    row = "INSERT INTO requests VALUES ('default', 'p', ?, 'submit', 'sha256:x', ?, 'me', 200, '{}', 1.0)"
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute(row, ("one", "done"))
        connection.execute(row, ("two", "begun"))
    assert world.json("gc", "--dry-run")["requests"] == 1
    assert world.json("gc")["requests"] == 1
    assert world.json("gc")["requests"] == 0


def test_a_tree_that_cannot_be_read_stops_it(world: World) -> None:
    """Nobody can say which files it needs."""
    digest = world.json("asset", "get", "model:tiny@1")["digest"].removeprefix("sha256:")
    path = world.root / ".posttrain" / "blobs" / "sha256" / digest[:2] / digest[2:]
    whole = path.read_bytes()
    path.write_bytes(b"{}")
    before = stored(world)
    refused = world(*NOW)
    assert (refused.exit_code, refused.stderr.count("\n")) == (8, 1)
    assert "gc must read it to find the artifacts that it needs" in refused.stderr
    assert stored(world) == before
    path.write_bytes(whole)
    world.ok(*NOW)


def test_a_store_that_another_workspace_uses_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_STORE", (tmp_path / "shared").as_uri())
    worlds = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        worlds.append(make_world(tmp_path / name, monkeypatch))
        worlds[-1].prepare(by_commands=True)
        if name == "one":
            worlds[0].ok(*NOW)
    refused = worlds[1](*NOW)
    assert (refused.exit_code, refused.stderr.count("\n")) == (ConflictError.exit_code, 1)
    assert f"is also used by the workspace {tmp_path / 'one' / '.posttrain'}, whose artifacts" in refused.stderr


def test_only_an_admin_may(world: World) -> None:
    from posttrain.api.control import VERBS
    from posttrain.domain.ids import Role

    assert VERBS["gc"].needs is Role.ADMIN


@pytest.fixture
def littered(world: World) -> tuple[World, dict[str, str]]:
    blobs = open_blobs(world.root / ".posttrain" / "blobs")
    for number in range(5):
        blobs.put(f"litter {number}".encode())
    return world, {**os.environ, "POSTTRAIN_WORKSPACE": str(world.root / ".posttrain")}


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, *(pytest.param(nth, marks=pytest.mark.slow) for nth in (3, 5))])
def test_who_dies_between_two_deletions_leaves_what_holds(littered: tuple[World, dict[str, str]], nth: int) -> None:
    world, environment = littered
    before = stored(world)
    environment["POSTTRAIN_CRASHPOINT"] = f"gc.before_delete@{nth}"
    died = subprocess.run([sys.executable, "-m", "posttrain", *NOW], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(stored(world)) == len(before) - (nth - 1)
    everything_holds(world)
    world.ok(*NOW)
    assert len(stored(world)) == len(before) - 5
    everything_holds(world)


SUBMIT = """
import json, sys
from pathlib import Path
from posttrain.app.control import open_control
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

control, blobs, folder = open_control(), open_blobs(Path(sys.argv[1])), Path("parts")
folder.mkdir()
for turn in range(int(sys.argv[2])):
    for part in range(20):
        row = {"prompt": f"{turn} {part}", "completion": "b"}
        (folder / f"train-{part:05}-of-00020.jsonl").write_text(json.dumps(row) + chr(10))
    put_tree(blobs, folder)  # of a submission that was refused: the next one finds it in the store
    print(control.add_dataset(folder, f"turn-{turn}").digest, flush=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_nothing_is_lost_that_somebody_records_at_the_same_time(world: World) -> None:
    """A process registers bytes that it finds in the store, where nobody needs them, while others delete at once."""
    store = world.root / ".posttrain" / "blobs"
    environment = {**os.environ, "POSTTRAIN_WORKSPACE": str(world.root / ".posttrain")}
    command = [sys.executable, "-c", SUBMIT, str(store), str(TURNS)]
    submitter = subprocess.Popen(command, env=environment, cwd=world.root, stdout=subprocess.PIPE, text=True)
    while submitter.poll() is None:
        world.json(*NOW)
    assert submitter.returncode == 0
    assert submitter.stdout is not None
    *made, last = submitter.stdout.read().split()
    assert (len(made), last) == (TURNS, "done")
    blobs = open_blobs(store)
    for digest in made:
        verify_tree(blobs, digest)
    everything_holds(world)


def test_what_is_recorded_after_the_marks_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is registered, with bytes that the store had already, when the sweep is about to delete them."""
    source = world.write("late.py", GOOD_REWARD + "# late\n")
    digest = open_blobs(world.root / ".posttrain" / "blobs").put(Path(source).read_bytes())
    batches = garbage._batches

    def late(old: list[StoredBlob]) -> Any:
        assert digest in {one.digest for one in old}
        world.ok("asset", "add", "reward:late", source)
        return batches(old)

    monkeypatch.setattr(garbage, "_batches", late)
    world.json(*NOW)
    assert digest in stored(world)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_after_any_history_what_is_recorded_holds_and_the_rest_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Runs, versions, releases, recalls, erasures and litter, in any order, with a sweep here and there."""
    chance, world = random.Random(seed), make_world(tmp_path, monkeypatch)
    world.prepare()
    world.clock.sleep(20)  # what is erased is erased after it was stored
    blobs = open_blobs(world.root / ".posttrain" / "blobs")
    garbage: set[str] = set()

    def run(turn: int) -> None:
        world.write("run.yaml", RUN.replace("seed: 17", f"seed: {chance.randrange(3)}"))
        world("run", "run.yaml", *(["--again"] if chance.random() < 0.3 else []))

    def held(turn: int) -> None:
        world.hold.add("grpo")
        world.write("held.yaml", RUN.replace("name: sort", "name: held").replace("seed: 17", f"seed: {turn}"))
        world("run", "held.yaml", "--timeout", "60")
        world("stop", "held")
        world.hold.clear()

    def reward(turn: int) -> None:
        source = GOOD_REWARD.replace("1.0", f"{chance.choice((0.95, 0.97, 1.0))}") + f"# {turn}\n"
        world.ok("asset", "add", "reward:sort", world.write("reward.py", source))

    def erased(turn: int) -> None:
        world.ok("asset", "add", f"reward:gone-{turn}", world.write("gone.py", GOOD_REWARD + f"# gone {turn}\n"))
        world.ok("erase", f"reward:gone-{turn}@1", "--reason", "asked")
        garbage.add(digest_bytes((world.root / "gone.py").read_bytes()))

    def litter(turn: int) -> None:
        garbage.add(blobs.put(f"litter {seed} {turn}".encode()))

    def release(turn: int) -> None:
        world("rollback", "prod") if chance.random() < 0.5 else world("promote", "sort", "--lift-quarantine", "again")

    def recall(turn: int) -> None:
        world("asset", chance.choice(("recall", "restore")), "dataset:train", "--reason", "a look")

    def sweep(turn: int) -> None:
        world.ok(*NOW)

    for turn in range(9):
        chance.choice((run, run, held, reward, erased, litter, release, recall, sweep))(turn)
    known = stored(world)
    done = world.json(*NOW)
    assert not stored(world) & garbage
    assert known - stored(world) <= garbage
    assert done["blobs"]["deleted"] == len(known - stored(world))
    everything_holds(world)
