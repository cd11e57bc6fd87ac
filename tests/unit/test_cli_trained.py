"""What a stage trained is a version of an asset: listed, with a lineage, and a base of other runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli_world import BAD_REWARD, World, make_world, write_model

from posttrain.app.workspace import open_workspace
from posttrain.store.audit import verify_rows


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def models(world: World) -> dict[str, str]:
    return {row["ref"]: row["digest"] for row in world.json("asset", "ls", "model")}


def output(world: World, run: str, stage: str, name: str = "model") -> str:
    rows = {row["name"]: row for row in world.json("get", run)["stages"]}
    return str(rows[stage]["outputs"][name]["digest"])


def on(world: World, model: str, name: str = "next") -> str:
    """A run file that trains one stage on `model`."""
    spec = yaml.safe_load(Path("run.yaml").read_text())
    spec |= {"name": name, "model": model, "gates": [], "release": None}
    spec["stages"] = {"sft": spec["stages"]["sft"]}
    del spec["rewards"]
    return world.write(f"{name}.yaml", yaml.safe_dump(spec))


def reward(world: World, source: str) -> None:
    world.ok("asset", "add", "reward:sort", world.write("reward.py", source))


def test_every_stage_that_trained_has_a_version(world: World) -> None:
    world.ship()
    run = world.newest()
    found = models(world)
    assert list(found) == ["model:sort/grpo@1", "model:sort/sft@1", "model:tiny@1"]
    assert found["model:sort/grpo@1"] == output(world, run, "grpo")
    assert f"run {run}" in world.ok("asset", "ls", "model")
    shown = world.json("asset", "get", "model:sort/grpo")
    assert shown["meta"] == {"run": run, "stage": "grpo", "output": "model"}
    assert f"posttrain lineage {shown['ref']}" in world.ok("asset", "get", shown["ref"])
    tree = world.json("lineage", "model:sort/grpo@1")
    assert (tree["name"], tree["details"]["registered as"]) == (f"{run}/grpo", "model:sort/grpo@1")
    assert {"dataset:train@1", "reward:sort@1", f"{run}/sft", run} <= {child["name"] for child in tree["children"]}
    assert "everything matches" in world.ok("verify", "model:sort/grpo@1")
    below = json.dumps(world.json("lineage", "dataset:train", "--downstream"))
    assert "model:sort/sft@1" in below


@pytest.mark.slow
def test_repeated_runs_of_a_name_make_versions_and_the_same_bytes_none(world: World) -> None:
    world.ship()
    reward(world, BAD_REWARD)
    assert world("run", "run.yaml").exit_code == 3  # its sft is taken from the cache
    assert list(models(world)) == ["model:sort/grpo@1", "model:sort/grpo@2", "model:sort/sft@1", "model:tiny@1"]
    found = models(world)
    assert found["model:sort/grpo@2"] == output(world, world.newest(), "grpo")
    reward(world, "# the same model\n" + BAD_REWARD)
    assert world("run", "run.yaml").exit_code == 3
    assert models(world) == found
    world.ok("asset", "add", "model:mine", "base")  # a person may name the same bytes twice
    assert world.json("asset", "get", "model:mine")["digest"] == found["model:tiny@1"]


@pytest.mark.parametrize("word", ["model:sort/grpo@1", "model:sort/grpo", "run:sort/grpo", "channel:prod@1"])
def test_whatever_it_is_called_it_is_one_model(world: World, word: str) -> None:
    world.ship()
    first = world.newest()
    world.ok("run", on(world, "model:sort/grpo@1", "other"))
    other = world.newest()
    plan = world.json("plan", on(world, word))
    (row,) = (row for row in plan["stages"][0]["inputs"] if row["slot"] == "model")
    assert row["digest"] == models(world)["model:sort/grpo@1"]
    assert plan["stages"][0]["cached_from"] == f"{other}/sft"
    world.ok("run", "next.yaml")
    tree = world.json("lineage", world.newest())
    (base,) = (child for child in tree["children"][0]["children"] if child["kind"] == "model")
    assert (base["name"], base["details"]["registered as"]) == (f"{first}/grpo", "model:sort/grpo@1")
    assert f"{world.newest()}/sft" in json.dumps(world.json("lineage", first, "--downstream"))
    assert "model:next" not in json.dumps(models(world))  # cached, and the same as model:other/sft@1


def test_a_name_without_a_version_is_pinned_when_it_is_submitted(world: World) -> None:
    world.ship()
    plan = world.json("plan", on(world, "model:sort/grpo"))
    meta = plan["manifest"]["stages"][0]["inputs"]["model"]
    assert (meta["name"], meta["meta"]) == ("model:sort/grpo@1", {"named": "model:sort/grpo"})
    refused = world("plan", on(world, "model:sort/grpo", "sort"))
    assert refused.exit_code == 2
    assert "since this file (sort) creates further versions; write model:sort/grpo@1" in refused.stderr
    world.ok("plan", on(world, "model:sort/grpo@1", "sort"))


def test_models_are_made_by_runs_or_by_people_never_both(world: World) -> None:
    world.ship()
    refused = world("asset", "add", "model:sort/grpo", "base")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
    write_model(world.root / "other", 0.2)
    world.ok("asset", "add", "model:sort", "other")  # a run's name is free
    assert "model:sort@1" in models(world)
    for word, said in (
        ("model:sort/nothing", "there is no model:sort/nothing; known:"),
        ("model:sort/grpo@9", "there is no model:sort/grpo@9; versions are 1 to 1"),
    ):
        refused = world("plan", on(world, word))
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert said in refused.stderr


def test_the_best_model_has_a_name_of_its_own_and_everything_is_proved(world: World) -> None:
    spec = yaml.safe_load(Path("run.yaml").read_text())
    spec["stages"]["grpo"] |= {"keep_best": True}
    world.write("run.yaml", yaml.safe_dump(spec))
    reward(world, BAD_REWARD.replace("0.3", "0.31"))  # the best one is another than what sft makes
    assert world("run", "run.yaml").exit_code == 3
    run = world.newest()
    assert models(world)["model:sort/grpo/best@1"] == output(world, run, "grpo", "best")
    assert world.json("lineage", "model:sort/grpo/best")["name"] == f"{run}/grpo/best"
    plan = world.json("plan", on(world, "model:sort/grpo/best@1"))
    (row,) = (row for row in plan["stages"][0]["inputs"] if row["slot"] == "model")
    assert row["digest"] == output(world, run, "grpo", "best")
    done = json.loads(world.ok("export", "model:sort/grpo/best@1", "taken", "-o", "json"))
    assert done["digest"] == output(world, run, "grpo", "best")
    assert json.loads(Path("taken/lineage.json").read_text())["model"]["run_id"] == run
    workspace = open_workspace()
    verify_rows(workspace.ledger)
    workspace.close()
