"""What was made from something, and what that costs to find."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import BAD_REWARD, World, make_world
from sqlalchemy import Engine, event

from posttrain.app.workspace import open_workspace
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.records import RunRecord, StageRecord, named, release_of, source_of, stage_of
from posttrain.store.trees import stored_sizes


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def flat(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from flat(child)


def below(world: World, target: str) -> dict[str, str]:
    """Name → kind of everything downstream."""
    return {node["name"]: node["kind"] for node in flat(world.json("lineage", target, "--downstream"))}


def test_what_used_a_data_set_is_found_to_its_releases(world: World) -> None:
    world.ship()
    first = world.newest()
    found = world.json("lineage", "dataset:train", "--downstream")
    assert (found["runs"], found["releases"], found["live"]) == ([first], ["channel:prod@1"], ["prod"])
    stages = {node["name"] for node in flat(found) if node["kind"] == "stage"}
    assert stages == {f"{first}/{name}" for name in ("sft", "grpo", "evaluate", "gate", "release")}
    held = world.json("lineage", "dataset:heldout@1", "--downstream")
    assert {f"{first}/grpo", f"{first}/evaluate"} <= {node["name"] for node in flat(held)}
    assert f"{first}/sft" not in {node["name"] for node in flat(held)}
    assert "used by 1 run; 1 release, live on prod" in world.ok("lineage", "reward:sort", "--downstream")
    assert below(world, found["digest"]) == below(world, found["digest"][:20])
    world.ok("asset", "add", "dataset:other", world.write("other.jsonl", '{"prompt": "a", "answer": "b"}\n'))
    assert world.ok("lineage", "dataset:other", "--downstream").endswith("nothing was made from it\n")


@pytest.mark.slow
def test_a_run_that_reused_a_stage_is_downstream_of_who_computed_it(world: World) -> None:
    world.ship()
    first = world.newest()
    world.write("reward.py", BAD_REWARD)
    world.ok("asset", "add", "reward:sort", "reward.py")
    assert world("run", "run.yaml").exit_code == 3
    second = world.newest()
    assert below(world, first)[f"{second}/sft"] == "stage"
    assert world.json("lineage", first, "--downstream")["runs"] == sorted([first, second])
    assert world.json("lineage", second, "--downstream")["releases"] == []
    spec = yaml.safe_load((world.root / "run.yaml").read_text()) | {"name": "next", "model": "channel:prod"}
    world.ok("run", world.write("next.yaml", yaml.safe_dump(spec | {"gates": [], "release": None})))
    assert below(world, "prod")[f"{world.newest()}/sft"] == "stage"


@pytest.mark.slow
def test_the_state_of_each_release_is_told(world: World) -> None:
    for value in ("0.94", "1.0"):
        world.write("reward.py", f"def score(completion, answer):\n    return {value}\n")
        world.ok("asset", "add", "reward:sort", "reward.py")
        world.ok("run", "run.yaml")
    world.ok("rollback", "prod")
    found = [node["details"] for node in flat(world.json("lineage", "model:tiny", "--downstream"))]
    states = {one["release"]: one["state"] for one in found if "release" in one}
    assert states == {"1": "live", "2": "rolled_back", "3": "live"}
    assert "used by 2 runs; 3 releases, live on prod" in world.ok("lineage", "model:tiny", "--downstream")


def test_files_that_only_a_run_file_names_are_found_by_their_digest(world: World) -> None:
    spec = yaml.safe_load((world.root / "run.yaml").read_text())
    spec["data"]["train"] = "./train.jsonl"
    world.ok("run", world.write("paths.yaml", yaml.safe_dump(spec)))
    assert world.json("lineage", "dataset:train", "--downstream")["live"] == ["prod"]


@pytest.mark.parametrize(
    ("altered", "command", "said"),
    [
        (
            "UPDATE releases SET report_digest = 'sha256:00'",
            "verify",
            "log records, got 'sha256:00'; restore",
        ),
        ("UPDATE releases SET model_digest = 'xyz'", "verify", "log records, got 'xyz'; restore"),
        ("UPDATE stages SET outputs = '{oops'", "get", "contains '{oops' where JSON was written: a row was altered"),
    ],
)
def test_an_altered_row_is_told_as_what_it_is(world: World, altered: str, command: str, said: str) -> None:
    world.ship()
    run_id = world.newest()
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as connection, connection:
        connection.execute(altered)
    result = world(command, "prod" if command == "verify" else run_id)
    assert result.exit_code == 8, "corrupt"
    assert said in result.stdout + result.stderr
    assert "bug" not in result.stderr


@pytest.mark.slow
def test_a_rollback_is_offered_where_there_is_something_to_go_back_to(world: World) -> None:
    offered = []
    for value in ("0.94", "1.0"):
        world.write("reward.py", f"def score(completion, answer):\n    return {value}\n")
        world.ok("asset", "add", "reward:sort", "reward.py")
        world.ok("run", "run.yaml")
        offered.append("posttrain rollback prod, " in world.ok("get", "prod"))
    world.ok("rollback", "prod")
    offered.append("posttrain rollback prod, " in world.ok("get", "prod"))
    assert offered == [False, True, False], "after the rollback there is nothing below"


def test_what_names_nothing_is_refused_in_one_line(world: World) -> None:
    for words, said in (
        (("sha256:12",), "for a digest, lineage needs --downstream; add --downstream"),
        (("sha256:12", "--downstream"), "there is no artifact"),
        (("nobody", "--downstream"), "there is no channel or run"),
    ):
        refused = world("lineage", *words)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert said in refused.stderr


def test_artifacts_know_their_bytes(world: World) -> None:
    world.ship()
    workspace = open_workspace()
    with workspace.ledger.snapshot() as now:
        made = now.made(*(f"run:{row.run_id}/{row.name}" for row in now.stages(world.newest())))
        found = now.artifacts(*(edge.digest for edge in made), *(asset.digest for asset in now.assets()))
        (held,) = now.holds(workspace.ledger.history("prod")[0].model_digest)
    assert len({edge.output for edge in made}) == 4
    sizes = stored_sizes(workspace.blobs, {one.digest: one.form for one in found})
    assert {one.digest: one.bytes for one in found} == sizes
    assert {one.kind for one in found} == {"asset", "output"}
    assert (held.holder, held.reason) == ("channel:prod", "live")
    workspace.close()


@contextmanager
def statements() -> Iterator[list[str]]:
    """Every statement that a database gets meanwhile."""
    said: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield said
    event.remove(Engine, "before_cursor_execute", note)


def test_what_a_lineage_costs_does_not_grow_with_other_runs(world: World) -> None:
    world.ship()
    words = (("lineage", "prod"), ("lineage", "dataset:train", "--downstream"), ("verify", "prod"))

    def cost() -> list[int]:
        counts = []
        for verb in words:
            with statements() as said:
                world.ok(*verb)
            counts.append(len(said))
        return counts

    world.ok("verify", "prod")  # seals
    before = cost()
    workspace = open_workspace()
    for number in range(60):
        with workspace.ledger.transaction("user:ada") as transaction:
            digest = digest_bytes(str(number).encode())
            run = RunRecord(f"other-{number}", "other", digest, "pending", "ada", 1.0)
            stage = StageRecord(run.id, "sft", 0, "sft", "pending")
            transaction.insert_run(run, [stage])
            blob = {"digest": digest, "form": "tree", "name": f"model:m{number}@1"}
            transaction.update_stage(stage, inputs={"model": blob}, outputs={"model": blob})
    workspace.seal()
    workspace.close()
    *after, verified = cost()
    assert after == before[:2]
    assert abs(verified - before[2]) <= 2, "the log's tree has another level, at most two"
    assert before[0] < 60


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sort-1/sft", ("run:sort-1/sft", "")),
        ("run:sort-1/grpo/best", ("run:sort-1/grpo", "best")),
        ("dataset:train@1", ("dataset:train@1", "")),
        ("channel:prod@3", ("channel:prod@3", "")),
        ("hf:org/name@main/a/b.jsonl", ("hf:org/name@main/a/b.jsonl", "")),
        ("trl.rewards:accuracy_reward", ("trl.rewards:accuracy_reward", "")),
        ("path:heldout.jsonl", ("path:heldout.jsonl", "")),
        ("", ("", "")),
    ],
)
def test_a_producer_is_named_as_in_a_run_file(name: str, source: tuple[str, str]) -> None:
    assert source_of(name) == source


def test_ends_of_edges_are_read_back() -> None:
    assert (stage_of("run:a/b"), stage_of("run:a"), stage_of("model:a/b@1")) == (("a", "b"), None, None)
    assert (release_of("channel:prod@3"), release_of("model:prod@3")) == (("prod", 3), None)
    assert release_of("channel:a@b@3") == ("a@b", 3)
    assert len(named("x" * 9000)) < 400


def test_audit_40_what_is_downstream_has_a_limit_and_says_what_is_left_off(world: World) -> None:
    world.ship()
    whole = world.json("lineage", "dataset:train", "--downstream")
    names = [node["name"] for node in flat(whole)]
    assert whole["left_off"] == 0
    assert len(names) > 4
    part = world.json("lineage", "dataset:train", "--downstream", "--limit", "2")
    shown = [node["name"] for node in flat(part)]
    assert len(shown) == 3, "itself and two more"
    assert set(shown) < set(names)
    assert part["left_off"] == len(names) - 3
    assert (part["runs"], part["releases"], part["live"]) == (whole["runs"], whole["releases"], whole["live"])
    assert {node["name"] for node in part["children"]} <= {node["name"] for node in whole["children"]}, "the nearest"
    said = world.ok("lineage", "dataset:train", "--downstream", "--limit", "2")
    assert f"; {part['left_off']} more distant objects are left out (--limit)" in " ".join(said.split())
    assert world("lineage", "prod", "--downstream", "--limit", "0").exit_code == 2
    workspace = open_workspace()
    train, fan = workspace.ledger.asset("dataset", "train", None), [f"fan-{number}" for number in range(300)]
    for run_id in fan:
        with workspace.ledger.transaction("user:ada") as transaction:
            run = RunRecord(run_id, "fan", digest_bytes(run_id.encode()), "pending", "ada", 1.0)
            stage = StageRecord(run.id, "sft", 0, "sft", "pending")
            transaction.insert_run(run, [stage])
            blob = {"digest": train.digest, "form": "file", "name": "dataset:train@1"}
            transaction.update_stage(stage, inputs={"data": blob})
    workspace.close()
    wide = world.json("lineage", "dataset:train", "--downstream")
    assert len(list(flat(wide))) == 201
    assert wide["left_off"] > 100
