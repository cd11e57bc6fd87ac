"""Versions that people approved or recalled: what begins with them, what is pointed at what was made from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_world import GOOD_REWARD, RUN, World, make_world

from posttrain.app.workspace import open_workspace
from posttrain.data.catalog import Catalog
from posttrain.domain.manifest import Manifest
from posttrain.store.audit import verify_rows


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def refused(world: World, *words: str, code: int) -> str:
    result = world(*words)
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1), (words, result.stdout, result.stderr)
    return str(result.stderr)


def shipped(world: World, quality: float) -> str:
    """A run of another reward that went to the channel; its id."""
    world.ok("asset", "add", "reward:sort", world.write(f"r{quality}.py", GOOD_REWARD.replace("1.0", str(quality))))
    world.ok("run", "run.yaml")
    return world.newest()


def test_nothing_begins_with_what_was_recalled(world: World) -> None:
    assert world.json("asset", "get", "dataset:train")["status"] is None
    said = world.ok("asset", "recall", "dataset:train", "--reason", "a licence ran out")
    assert "dataset:train@1 is recalled by user:" in said
    assert "used by 0 runs, live on no channel" in said
    for words in (("plan", "run.yaml"), ("run", "run.yaml"), ("run", "run.yaml", "--again")):
        told = refused(world, *words, code=2)
        assert "stages.grpo.data: dataset:train@1 was recalled by user:" in told or "stages.sft.data" in told
        assert "a licence ran out; use another version, or posttrain asset restore dataset:train@1" in told
    assert world.json("ls")["runs"] == [], "nothing is half-written"
    (row,) = (one for one in world.json("asset", "ls", "dataset") if one["name"] == "train")
    assert (row["status"]["status"], row["status"]["reason"]) == ("recalled", "a licence ran out")
    assert "recalled by user:" in world.ok("asset", "ls")
    copy = world.write("copy.jsonl", (world.root / "train.jsonl").read_text())
    world.write("copy.yaml", RUN.replace("train: dataset:train", f"train: ./{copy}"))
    said = refused(world, "plan", "copy.yaml", code=2)
    assert "has the bytes of dataset:train@1, recalled" in said, "bytes, not names"
    world.ok("asset", "restore", "dataset:train", "--reason", "renewed")
    world.ok("run", "run.yaml")
    workspace = open_workspace()
    verify_rows(workspace.ledger)
    workspace.close()


@pytest.mark.slow
def test_what_was_made_from_it_is_told_and_neither_ships_nor_is_trained_on(world: World) -> None:
    world.ship()
    first = world.newest()
    assert f"({first!r} is a run, and its stages are shown with it)" in refused(world, "get", f"{first}/grpo", code=2)
    assert "(did you mean 'sort'?)" in refused(world, "get", "srot", code=2)
    second = shipped(world, 0.97)
    told = world.ok("asset", "recall", "reward:sort@1", "--reason", "it pays for length")
    assert "used by 1 run, live on no channel" in told, "the second was made by version 2"
    assert "comes from reward:sort@1, recalled by user:" in refused(world, "rollback", "prod", code=9)
    assert world.json("get", "prod")["history"][-1]["run_id"] == second
    assert "recalled" not in world.ok("ls") + world.ok("get", "prod") + world.ok("lineage", "prod")
    world.write(
        "on.yaml", RUN.replace("model: model:tiny", f"model: run:{first}/grpo").replace("name: sort", "name: other")
    )
    assert "comes from reward:sort@1, recalled" in refused(world, "plan", "on.yaml", code=2)
    assert "posttrain asset restore reward:sort@1 first" in refused(world, "asset", "approve", "reward:sort@1", code=9)
    world.ok("asset", "restore", "reward:sort@1")
    world.ok("asset", "approve", "reward:sort@1")
    assert "rolled back" not in world.ok("rollback", "prod")
    assert world.json("asset", "get", "reward:sort@1")["status"]["status"] == "approved"


def test_a_recall_while_a_run_is_under_way_turns_its_release_away(world: World) -> None:
    text = RUN.replace("gates:\n", "  approval: {kind: wait, signal: go, within: 24h, after: gate}\ngates:\n")
    world.write("run.yaml", text.replace("model: grpo}\n", "model: grpo, after: approval}\n"))
    assert world("run", "run.yaml", "--timeout", "60").exit_code == 12
    run = world.newest()
    said = world.ok("asset", "recall", "model:tiny", "--reason", "its weights were poisoned")
    assert f"run {run} continues with it; posttrain stop {run}" in said
    world.ok("signal", run, "go")
    assert world("attach", run).exit_code == 9
    found = world.json("get", run)
    assert (found["state"], found["reason"]) == ("rejected", "Recalled")
    assert "comes from model:tiny@1, recalled by user:" in " ".join(world.ok("why", run).split())
    assert world.json("ls")["channels"] == []
    world.ok("asset", "restore", "model:tiny")
    assert "prod points at" in world.ok("promote", run)


def test_saying_it_twice_is_saying_it_once(world: World) -> None:
    for _ in range(2):
        world.ok("asset", "recall", "dataset:train", "--reason", "one")
    world.ok("asset", "recall", "dataset:train", "--reason", "another")
    assert world.json("asset", "get", "dataset:train")["status"]["reason"] == "another"
    world.ok("asset", "restore", "dataset:heldout")
    workspace = open_workspace()
    workspace.seal()
    told = [event.kind for event in workspace.ledger.events(subject_prefix="dataset:train@1")]
    workspace.close()
    assert told.count("asset.recalled") == 2
    assert "dataset:tran" in refused(world, "asset", "recall", "dataset:tran", code=2)


def test_the_reason_of_a_recall_can_be_erased(world: World) -> None:
    world.ok("asset", "recall", "dataset:train", "--reason", "whisperings")
    world.ok("erase", "dataset:train@1", "--reason", "asked to")
    assert "whisperings" not in world.ok("asset", "get", "dataset:train@1")
    workspace = open_workspace()
    verify_rows(workspace.ledger)
    workspace.close()


@pytest.mark.slow
def test_bytes_are_followed_under_any_name(world: World) -> None:
    world.ship()
    (made,) = (world.root / ".posttrain" / "runs").glob("*/grpo/*/outputs/model")
    world.ok("asset", "add", "model:mine", str(made))
    world.write("other.jsonl", (world.root / "train.jsonl").read_text().replace("sort 1", "sort 77"))
    world.ok("asset", "add", "dataset:other", "other.jsonl")
    world.ok("asset", "add", "reward:sort", world.write("r2.py", GOOD_REWARD.replace("1.0", "0.97")))
    text = RUN.replace("name: sort", "name: more").replace("model:tiny", "model:mine")
    world.write("more.yaml", text.replace("dataset:train", "dataset:other"))
    world.ok("run", "more.yaml")
    said = world.ok("asset", "recall", "dataset:train")
    assert "live on prod" in said
    assert "no earlier release can be restored" in said
    assert ", recalled)" in world.ok("ls")
    assert "recalled: its live model comes from dataset:train@1, recalled by" in world.ok("get", "prod")
    assert "status: recalled by" in " ".join(world.ok("lineage", "dataset:train").split())
    assert "warning: the model comes from dataset:train@1" in world("export", "prod", "out").stderr
    world.write("next.yaml", text.replace("model:mine", "channel:prod").replace("dataset:train", "dataset:other"))
    assert "comes from dataset:train@1" in refused(world, "plan", "next.yaml", code=2)
    assert "comes from dataset:train@1" in refused(world, "run", "more.yaml", "--again", code=2)


@pytest.mark.slow
def test_what_only_measured_is_not_below(world: World) -> None:
    text = RUN.replace(",\n         probe: {data: heldout, every: 2, items: 8}", "")
    world.write("run.yaml", text)
    world.ok("run", "run.yaml")
    world.ok("asset", "add", "reward:two", world.write("r2.py", GOOD_REWARD.replace("1.0", "0.97")))
    after = text.replace("name: sort", "name: after").replace("channel: prod", "channel: next")
    world.write("after.yaml", after.replace("model:tiny", "channel:prod").replace("reward:sort", "reward:two"))
    world.ok("run", "after.yaml")
    assert "used by 2 runs, live on no channel" in world.ok("asset", "recall", "dataset:heldout")
    for channel in ("prod", "next"):
        base = f"name: base\nowner: ada\nseed: 1\nmodel: channel:{channel}\ndata: {{train: dataset:train}}\n"
        world.write("base.yaml", f"{base}stages:\n  sft: {{kind: sft, data: train, steps: 4}}\n")
        world.ok("plan", "base.yaml")


def test_a_run_that_will_use_it_later_is_listed_and_one_that_ended_does_not_go_on(world: World) -> None:
    world.hold.add("sft")
    assert world("run", "run.yaml", "--timeout", "60").exit_code == 12
    run = world.newest()
    said = world.ok("asset", "recall", "reward:sort", "--reason", "it pays for length")
    assert f"run {run} continues with it; posttrain stop {run}" in said, "its stage is not bound yet"
    world.ok("stop", run)
    world("attach", run)
    assert world.json("get", run)["state"] == "stopped"
    pinned = world.root / ".posttrain" / "runs" / run / "environment.json"
    pinned.write_text("{}")
    for words in (("retry", run), ("run", "run.yaml")):
        assert "stages.grpo.reward: reward:sort@1 was recalled" in refused(world, *words, code=2)
    assert pinned.exists(), "what is refused has changed nothing"
    told = world("plan", "run.yaml")
    assert (told.exit_code, "was recalled by user:" in told.stdout + told.stderr) == (0, True)


def test_a_recall_between_plan_and_submission_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    was = Catalog.publish

    def publish(self: Catalog, manifest: Manifest) -> None:
        monkeypatch.setattr(Catalog, "publish", was)
        world.ok("asset", "recall", "dataset:train")
        was(self, manifest)

    monkeypatch.setattr(Catalog, "publish", publish)
    assert "dataset:train@1 was recalled" in refused(world, "run", "run.yaml", code=2)
    assert world.json("ls")["runs"] == []


def test_two_names_of_the_same_bytes(world: World) -> None:
    world.ok("asset", "add", "dataset:copy", world.write("copy.jsonl", (world.root / "train.jsonl").read_text()))
    world.ok("asset", "recall", "dataset:train", "--reason", "bad")
    told = world("asset", "approve", "dataset:copy")
    assert "warning: no run can start from these bytes, because dataset:train@1 is recalled by user:" in told.stderr
    world.write("copy.yaml", RUN.replace("dataset:train", "dataset:copy"))
    assert "dataset:copy@1 has the bytes of dataset:train@1" in refused(world, "plan", "copy.yaml", code=2)
