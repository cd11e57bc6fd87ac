"""`verify RUN` reads what the run needs, whatever else the ledger holds, and finds what was altered of it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from cli_world import RUN, World, make_world

from posttrain.app.workspace import Workspace
from posttrain.store import audit, sealer
from posttrain.store.sealer import seal


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.ship()
    return made


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Events whose envelopes are hashed, leaves and tiles that are read, rows that are compared."""
    found: Counter[str] = Counter()
    envelope, hashes, compare = sealer.envelope_leaf, sealer._hashes, audit._compare

    def counted(kind, number, function):  # type: ignore[no-untyped-def]
        def call(*words, **named):  # type: ignore[no-untyped-def]
            answer = function(*words, **named)
            found[kind] += number(answer)
            return answer

        return call

    with monkeypatch.context() as patch:
        patch.setattr(sealer, "envelope_leaf", counted("events", lambda _: 1, envelope))
        patch.setattr(sealer, "_hashes", counted("hashes", len, hashes))
        patch.setattr(audit, "_compare", counted("rows", int, compare))
        yield found


def others(world: World, number: int) -> None:
    """Events and rows of many other runs."""
    workspace = Workspace(world.root / ".posttrain")
    with workspace.ledger.transaction("user:ann") as transaction:
        for one in range(number):
            transaction.append_event("something.else", f"other-{one}", {"number": one})
    seal(workspace.ledger)
    workspace.close()


def test_audit_38_what_is_read_of_a_run_does_not_grow_with_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.newest()
    seen = []
    for _ in range(3):
        with reads(monkeypatch) as found:
            assert "everything matches" in world.ok("verify", run)
        seen.append(found)
        others(world, 1500)
    with reads(monkeypatch) as whole:
        world.ok("verify", "prod")
    assert [one["events"] for one in seen] == [seen[0]["events"]] * 3
    assert [one["rows"] for one in seen] == [seen[0]["rows"]] * 3
    assert seen[2]["hashes"] < 2000 < whole["events"]
    assert 20 < seen[0]["events"] < 200
    assert seen[0]["rows"] > 10


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE stages SET metrics = '{}' WHERE name = 'evaluate'", "stage"),
        ("UPDATE runs SET owner = 'eve'", "run"),
        ("DELETE FROM attempts WHERE stage = 'sft'", "attempt"),
        (
            "UPDATE edges SET digest = replace(digest, 'a', 'b') WHERE consumer LIKE '%/grpo' AND slot = 'data'",
            "edge",
        ),
        ("UPDATE releases SET action = 'rollback', at = at - 1000000", "release 1 of channel prod"),
        ("UPDATE releases SET run_id = NULL", "release 1 of channel prod"),
        ("DELETE FROM releases", "release 1 of channel prod"),
        ("UPDATE deployments SET weight = 0.5", "deployment of channel prod"),
        ("UPDATE channels SET frozen = 'all'", "channel prod"),
        (
            "INSERT INTO approval_requests SELECT project, 'sha256:' || hex(zeroblob(32)), 'prod', id, '{}', owner, 1.0"
            " FROM runs",
            "approval request",
        ),
        ("UPDATE assets SET meta = '{}' WHERE kind = 'dataset' AND name = 'train'", "asset dataset:train@1"),
        ("UPDATE events SET kind = 'stage.failed' WHERE kind = 'stage.succeeded'", "its envelope does not match"),
        (
            "DELETE FROM payloads WHERE event IN (SELECT id FROM events WHERE kind = 'stage.ready')",
            "its words are missing",
        ),
        ("UPDATE leaves SET leaf = zeroblob(32) WHERE sequence = 1", "event log is broken"),
        ("UPDATE tree_head SET size = size - 1", "event log is broken"),
    ],
)
def test_audit_38_what_was_altered_of_a_run_is_found(world: World, statement: str, words: str) -> None:
    run = world.newest()
    world.ok("verify", run)
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as ledger:
        assert ledger.execute(statement).rowcount > 0
        ledger.commit()
    told = world("verify", run)
    assert told.exit_code == 8, told.output
    assert words in told.output + told.stderr


def test_audit_38_a_forged_tile_and_leaf_do_not_hide_each_other(world: World) -> None:
    run = world.newest()
    others(world, 600)
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as ledger:
        ledger.execute("UPDATE tiles SET hash = zeroblob(32) WHERE level = 0 AND position = 0")
        ledger.commit()
    assert world("verify", run).exit_code == 8


def test_audit_38_a_run_whose_words_were_erased_verifies(world: World) -> None:
    run = world.newest()
    world.write("run.yaml", RUN.replace("seed: 17", "seed: 18"))
    world.ok("run", "run.yaml", "--again")
    world.ok("erase", run, "--reason", "asked")
    assert "everything matches" in world.ok("verify", run)
    assert "everything matches" in world.ok("verify", world.newest())
