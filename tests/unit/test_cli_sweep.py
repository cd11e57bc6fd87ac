"""`posttrain sweep`: points, runs, cache, table, what is refused; and `--set` of plan, run and lock."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from cli_world import BAD_REWARD, GOOD_REWARD, RUN, World, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    made.ok("asset", "add", "reward:sort", made.write("reward.py", GOOD_REWARD))
    made.ok("asset", "add", "reward:sort", made.write("bad.py", BAD_REWARD))
    made.write("run.yaml", RUN)
    return made


REWARDS = "rewards.exact=reward:sort@1,reward:sort@2"


def test_settings_are_ranked_nothing_ships_and_the_cache_is_shared(world: World) -> None:
    shown = world.ok("sweep", "run.yaml", "--set", REWARDS)
    assert "2 settings x 1 seed = 2 runs; ranked by heldout/accuracy, higher is better" in shown
    assert "[2/2] rewards.exact reward:sort@2, seed 17: run sort-" in shown
    assert "note: a sweep releases nothing" in shown
    assert "sft succeeded; reused from" in shown
    assert "another seed may order the settings differently" in shown
    assert "next: posttrain run run.yaml --set rewards.exact=reward:sort@1" in shown
    assert world.json("ls")["channels"] == []
    started = len(world.executor.launched)
    found = world.json("sweep", "run.yaml", "--set", REWARDS)
    assert len(world.executor.launched) == started, "the same command attaches to its runs"
    assert [one["rank"] for one in found["settings"]] == [[1, 1], [2, 2]]
    assert [one["mean"]["value"] for one in found["settings"]] == [0.98, 0.3]
    assert [one["set"] for one in found["settings"]] == [
        {"rewards.exact": "reward:sort@1"},
        {"rewards.exact": "reward:sort@2"},
    ]
    (pair,) = found["differences"]
    assert pair["difference"] == pytest.approx(-0.68)
    assert found["metric"] == "heldout/accuracy"


@pytest.mark.parametrize("seeds", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_audit_33_fewer_than_three_seeds_are_warned_of(world: World, seeds: int) -> None:
    words = ("sweep", "run.yaml", "--set", REWARDS, "--seeds", str(seeds))
    planned = world.json(*words, "--dry-run")
    found = world.json(*words)
    assert planned["warnings"] == found["warnings"]
    if seeds == 3:
        assert found["warnings"] == []
        assert "warning:" not in world.ok(*words)
        return
    (warning,) = found["warnings"]
    counted = f"seed{'s' * (seeds > 1)} of each setting {'are' if seeds > 1 else 'is'} compared"
    assert warning.startswith(f"only {seeds} {counted}")
    shown = " ".join(world.ok(*words).split())
    assert shown.count(f"warning: {warning}") == 2, "before anything is spent, and below the table"


def test_audit_33_seeds_of_one_setting_are_no_comparison_of_settings(world: World) -> None:
    assert world.json("sweep", "run.yaml", "--seeds", "2")["warnings"] == []


@pytest.mark.slow
def test_the_best_setting_is_run_as_the_table_says(world: World) -> None:
    world.ok("sweep", "run.yaml", "--set", REWARDS)
    computed = len(world.executor.launched)
    world.ok("run", "run.yaml", "--set", "rewards.exact=reward:sort@1")
    assert len(world.executor.launched) == computed, "sft, grpo and its evaluation are reused"
    assert world.json("ls")["channels"][0]["channel"] == "prod"


def test_seeds_are_derived_and_the_first_is_the_files(world: World) -> None:
    points = world.json("sweep", "run.yaml", "--set", "grpo.steps=4,6", "--seeds", "3", "--dry-run")["runs"]
    assert len(points) == len({point["manifest"] for point in points}) == 6
    seeds = [point["seed"] for point in points]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 17
    assert len(set(seeds)) == 3
    assert world.json("ls")["runs"] == [], "a dry run submits nothing"
    again = world.json("sweep", "run.yaml", "--set", "grpo.steps=4,6", "--seeds", "2", "--dry-run")["runs"]
    assert [point["manifest"] for point in again] == [points[n]["manifest"] for n in (0, 1, 3, 4)]


@pytest.mark.slow
def test_seeds_may_be_named(world: World) -> None:
    found = world.json("sweep", "run.yaml", "--set", "seed=3,4,5", "--set", REWARDS)
    assert found["seeds"] == [3, 4, 5]
    assert [[run["seed"] for run in one["runs"]] for one in found["settings"]] == [[3, 4, 5]] * 2
    assert [one["rank"] for one in found["settings"]] == [[1, 1], [2, 2]]
    assert "3 settings" not in world.ok("sweep", "run.yaml", "--set", "seed=3,4,5")
    assert "must be whole numbers, got 'x'" in world("sweep", "run.yaml", "--set", "seed=x,y").stderr


def test_a_run_that_fails_stops_no_other(world: World) -> None:
    world.write("half.py", GOOD_REWARD.replace("return 1.0", "return 0.5"))
    world.ok("asset", "add", "reward:sort", "half.py")
    world.broken["grpo"] = [9, 9]  # the same twice: nobody tries again
    ended = world("sweep", "run.yaml", "--set", "rewards.exact=reward:sort@1,reward:sort@2,reward:sort@3")
    assert ended.exit_code == 6, ended.output
    assert "stage grpo" in ended.stderr.strip().splitlines()[-1]
    assert "not measured" in ended.output
    assert "[3/3]" in ended.output
    assert "1 of 3 settings were not measured" in ended.output
    assert "0.5 " in ended.output or "0.50" in ended.output


def test_another_models_number_does_not_stand_for_one_that_was_not_measured(world: World) -> None:
    world.write(
        "run.yaml",
        RUN.replace(
            "  evaluate:", "  before: {kind: evaluate, model: sft, suites: {heldout: {data: heldout}}}\n  evaluate:"
        ),
    )
    world.broken["grpo"] = [9, 9]
    words = world("sweep", "run.yaml", "--set", "rewards.exact=reward:sort@1,reward:sort@2", "-o", "json").stdout
    first, second = json.loads(words)["settings"]
    assert (first["mean"], first["rank"]) == (None, None), "the SFT model was measured, not this one"
    assert second["mean"]["value"] == 0.3


@pytest.mark.slow
def test_the_last_line_runs_the_best_setting_exactly(world: World) -> None:
    rate = "0.00012345678901"
    shown = world.ok("sweep", "run.yaml", "--set", f"grpo.optimizer.learning_rate={rate},1e-4", "--set", REWARDS)
    line = shown.strip().splitlines()[-1].removeprefix("next: ").strip()
    words = shlex.split(line)
    assert words[:3] == ["posttrain", "run", "run.yaml"]
    computed = len(world.executor.launched)
    world.ok(*words[1:])
    assert len(world.executor.launched) == computed, "every stage of it is in the cache"
    found = world.json("sweep", "run.yaml", "--set", f"grpo.optimizer.learning_rate={rate},1e-4", "--dry-run")
    assert [run["set"]["grpo.optimizer.learning_rate"] for run in found["runs"]] == [float(rate), 1e-4]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "needs a setting that varies"),
        (["--set", "grpo.steps=5"], "needs a setting that varies"),
        (["--set", "grpo.stepz=5,6"], "did you mean 'steps'"),
        (["--set", "grpo.steps=0,6"], "grpo.steps 0"),
        (["--set", "dpo.steps=1,2"], "the run file has no stage 'dpo' (did you mean 'grpo'?)"),
        (["--set", "grpo.steps=1,2", "--metric", "heldout/acuracy"], "did you mean 'heldout/accuracy'"),
        (
            ["--set", "grpo.steps=1,2", "--metric", "heldout/response_tokens"],
            "--better must be higher or lower for",
        ),
        (["--set", "grpo.steps=1,2", "--better", "up"], "--better must be higher or lower, got 'up'"),
        (["--set", "seed=1,2", "--seeds", "2"], "both set the seed; give one"),
        (["--set", "owner=ada,bob"], "needs an evaluate stage"),
        (["--set", "grpo.steps=" + ",".join(map(str, range(1, 501))), "--seeds", "3"], "at most 1000 runs, got 500"),
    ],
)
def test_what_cannot_be_swept_is_one_line_before_anything_runs(world: World, words: list[str], error: str) -> None:
    if "needs an evaluate stage" in error:
        world.write("run.yaml", RUN.split("  evaluate:")[0])
    ended = world("sweep", "run.yaml", *words)
    assert ended.exit_code == 2, ended.output
    assert error in ended.stderr.strip().splitlines()[-1]
    assert world.json("ls")["runs"] == []


def test_equal_points_are_refused(world: World) -> None:
    ended = world("sweep", "run.yaml", "--set", "rewards.exact=reward:sort,reward:sort@2")
    assert ended.exit_code == 2
    assert "which lead to the same run; leave one out" in ended.stderr


def test_set_changes_a_plan_a_lock_and_no_locked_manifest(world: World) -> None:
    plain, changed = world.json("plan", "run.yaml"), world.json("plan", "run.yaml", "--set", "grpo.steps=9")
    assert plain["digest"] != changed["digest"]
    steps = {stage["name"]: stage["params"].get("steps") for stage in changed["manifest"]["stages"]}
    assert (steps["sft"], steps["grpo"]) == (4, 9)
    locked = world.json("lock", "run.yaml", "--set", "grpo.steps=9")
    assert locked["digest"] == changed["digest"]
    ended = world("run", "run.lock.json", "--set", "grpo.steps=8")
    assert ended.exit_code == 2
    assert "--set cannot change a locked manifest" in ended.stderr
    assert "posttrain run run.yaml --set grpo.steps=9" in world.ok("plan", "run.yaml", "--set", "grpo.steps=9")
