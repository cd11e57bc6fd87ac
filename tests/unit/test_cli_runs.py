"""The main job through the command line, over scripted jobs: train, judge, ship, catch a spoiled reward, roll back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cli_world
import pytest
from cli_world import BAD_REWARD, GOOD_REWARD, World, make_world

from posttrain import plan, submit
from posttrain.app.workspace import Workspace, open_workspace
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobOrder, Metric
from posttrain.store.attempts import AttemptFolder
from posttrain.store.audit import verify_rows
from posttrain.views.logs import RunWatch
from posttrain.web.curves import learning_curve
from posttrain.web.panels import CurveSeries


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A workspace with data, model, reward and run file."""
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, str]]]:
    """Run A ships, run B (the same file, a spoiled reward) does not, run C ships again."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("story"), patch)
        world.prepare()
        ids: dict[str, str] = {}
        assert world("run", "run.yaml").exit_code == 0
        ids["A"] = world.newest()
        world.ok("asset", "add", "reward:sort", world.write("reward_v2.py", BAD_REWARD))
        rejected = world("run", "run.yaml")
        assert rejected.exit_code == 3
        assert rejected.stderr.startswith("error: run sort-")
        assert len(rejected.stderr.strip().splitlines()) == 1
        ids["B"] = world.newest()
        better = world.write("reward_v3.py", GOOD_REWARD.replace("1.0", "0.97"))
        world.ok("asset", "add", "reward:sort", better)
        world.ok("run", "run.yaml")
        ids["C"] = world.newest()
        yield world, ids


def test_a_run_prints_stages_verdicts_and_where_its_report_is(world: World) -> None:
    shown = world.ok("run", "run.yaml")
    run = world.newest()
    for words in ("sft", "grpo", "baseline-evaluate", "skipped", "accuracy", "PASS", "prod now points at"):
        assert words in shown
    folder = world.root / ".posttrain" / "runs" / run
    assert f"report: {folder / 'report.html'}" in shown
    assert (folder / "report.html").read_text().count("<html")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_for_programs_prints_what_get_prints_and_exits_with_its_outcome(world: World) -> None:
    shown = world("run", "run.yaml", "-o", "json")
    assert shown.exit_code == 0
    told = json.loads(shown.stdout)
    assert told == world.json("get", told["id"]) == world.json("attach", told["id"])
    assert {score["metric"] for score in told["scores"]["rows"]} >= {"heldout/accuracy"}
    assert shown.stderr.startswith(f"run {told['id']}  manifest sha256:")
    world.ok("asset", "add", "reward:sort", world.write("reward_v2.py", BAD_REWARD))
    rejected = world("run", "run.yaml", "-o", "json")
    assert (rejected.exit_code, json.loads(rejected.stdout)["reason"]) == (3, "GateFailed")
    assert rejected.stderr.splitlines()[-1].startswith("error: run sort-")


def test_the_same_file_attaches_and_again_starts_another(world: World) -> None:
    world.ship()
    first = world.newest()
    assert f"attached to run {first}: succeeded" in world.ok("run", "run.yaml")
    assert world.newest() == first
    launched = len(world.executor.launched)
    world.ok("run", "run.yaml", "--again")
    assert world.newest() != first
    assert len(world.executor.launched) == launched, "everything came from the stage cache"


def test_another_seed_is_another_run(world: World) -> None:
    world.ship()
    first = world.newest()
    world.ok("run", "run.yaml", "--seed", "18")
    assert world.newest() != first
    assert world.json("plan", "run.yaml", "--seed", "18")["existing"] == world.newest()


def test_a_locked_manifest_is_its_own_digest_and_runs(world: World) -> None:
    locked = world.json("lock", "run.yaml")
    data = Path(locked["path"]).read_bytes()
    assert locked["path"] == "run.lock.json"
    assert "sha256:" + hashlib.sha256(data).hexdigest() == locked["digest"]
    world.ok("run", "run.lock.json")
    assert world.json("get", "sort")["manifest"] == locked["digest"]
    assert "attached to run" in world.ok("run", "run.yaml")


def test_a_plan_shows_graph_cache_cost_and_power_and_writes_nothing(world: World) -> None:
    before = {path: path.stat().st_mtime_ns for path in (world.root / ".posttrain" / "blobs").rglob("*")}
    view = world.json("plan", "run.yaml")
    assert [stage["name"] for stage in view["stages"]] == [
        *("sft", "grpo", "evaluate", "baseline-evaluate", "gate", "release")
    ]
    assert all(stage["cached_from"] is None for stage in view["stages"])
    assert view["existing"] is None
    assert "no history yet" in view["stages"][0]["estimate"]["basis"]
    assert {note["gate"] for note in view["power"]} == {"accuracy", "no-regression"}
    assert all(note["items"] == 200 for note in view["power"])
    assert "no history yet" in world.ok("plan", "run.yaml")
    assert {path: path.stat().st_mtime_ns for path in (world.root / ".posttrain" / "blobs").rglob("*")} == before
    assert world.json("ls")["runs"] == []


def test_a_plan_after_a_run_knows_what_is_cached_and_what_it_costs(world: World) -> None:
    world.ship()
    run = world.newest()
    view = {stage["name"]: stage for stage in world.json("plan", "run.yaml")["stages"]}
    assert view["sft"]["cached_from"] == f"{run}/sft"
    assert view["evaluate"]["cached_from"] == f"{run}/evaluate"
    fresh = {stage["name"]: stage for stage in world.json("plan", "run.yaml", "--seed", "5")["stages"]}
    assert fresh["sft"]["cached_from"] is None
    assert fresh["sft"]["estimate"]["tokens"] == 400
    assert "1 earlier sft stage" in fresh["sft"]["estimate"]["basis"]
    assert f"cached: {run}/sft" in world.ok("plan", "run.yaml")


def test_a_plan_warns_of_prompts_seen_in_training(world: World) -> None:
    world.write("heldout.jsonl", (world.root / "train.jsonl").read_text())
    world.ok("asset", "add", "dataset:heldout", "heldout.jsonl")
    warnings = world.json("plan", "run.yaml")["warnings"]
    assert any("60 of 60 evaluation rows are in the training data" in warning for warning in warnings)


@pytest.mark.slow
def test_why_says_which_number_missed_by_how_much(story: tuple[World, dict[str, str]]) -> None:
    world, ids = story
    told = world.json("why", ids["B"])
    verdict = next(v for v in told["gates"]["verdicts"] if v["gate"] == "accuracy")
    assert verdict["outcome"] == "fail"
    assert verdict["missed_by"] > 0.5
    assert told["compared_with"] == ids["A"]
    assert told["next_action"] == f"posttrain diff {ids['A']} {ids['B']}"
    shown = world.ok("why", ids["B"])
    assert "FAIL" in shown
    assert "which misses the requirement (at least 0.9) by 0.6" in shown
    assert "95 % confidence limit" in shown
    assert "reason: 0 of 2 gates passed (GateFailed)" in shown
    assert f"posttrain why {ids['B']}" not in shown, "the command that a person has just typed"
    assert "gates failed" in world.ok("ls")
    assert "gates failed; " not in world.ok("ls"), "the list has the first clause, why has the rest"
    assert "--watch needs a run, got channel prod" in str(world("get", "prod", "--watch").stderr)


def test_diff_says_that_the_reward_changed(story: tuple[World, dict[str, str]]) -> None:
    world, ids = story
    found = world.json("diff", ids["A"], ids["B"])
    (changed,) = found["differences"]
    assert (changed["before"], changed["after"]) == ("reward:sort@1", "reward:sort@2")
    notes = "\n".join(changed["notes"])
    assert "source_digest" in notes
    assert "Exact match. → Sounds sure." in notes
    assert any(row["metric"] == "evaluate/heldout/accuracy" and row["b"] < row["a"] for row in found["metrics"])
    assert "reward:sort@2" in world.ok("diff", ids["A"], ids["B"])


def test_stages_are_shared_between_the_runs(story: tuple[World, dict[str, str]]) -> None:
    world, ids = story
    stages = {stage["name"]: stage for stage in world.json("get", ids["C"])["stages"]}
    assert stages["sft"]["cached_from"] == f"{ids['A']}/sft"
    assert f"reused from {ids['A']}/sft" in world.ok("get", ids["C"])
    assert "sft says hello" in world.ok("logs", ids["C"], "sft")


def test_lineage_verify_rollback_promote(story: tuple[World, dict[str, str]]) -> None:
    world, ids = story
    tree = world.json("lineage", "prod")
    flat = json.dumps(tree)
    for name in ("reward:sort@3", "dataset:train@1", "model:tiny@1", f"{ids['C']}/grpo", "manifest"):
        assert name in flat
        assert name in world.ok("lineage", "prod")
    checked = world.json("verify", "prod")
    assert checked["ok"]
    assert checked["checked"] >= 8
    assert f"of run {ids['A']}" in world.ok("rollback", "prod")
    assert f"made by: grpo in {ids['A']}/grpo" in world.ok("lineage", "prod")
    assert f"of run {ids['C']}" in world.ok("rollback", "prod", "--to", ids["C"], "--lift-quarantine", "a slip")
    history = world.json("get", "prod")["history"]
    assert [row["action"] for row in history[-2:]] == ["rollback", "rollback"]
    assert {row["run_id"]: row["state"] for row in history} == {ids["A"]: "rolled_back", ids["C"]: "live"}
    assert "rolled back" in world.ok("get", "prod")
    assert world("rollback", "prod", "--from", "1").exit_code == 9
    assert world("promote", ids["B"]).exit_code == 3
    assert world.json("ls")["channels"][0]["run_id"] == ids["C"]


def test_a_corrupt_blob_is_exit_8(world: World) -> None:
    world.ship()
    digest = world.json("asset", "get", "reward:sort")["digest"].removeprefix("sha256:")
    blob = world.root / ".posttrain" / "blobs" / "sha256" / digest[:2] / digest[2:]
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes().replace(b"1.0", b"9.0"))
    result = world("verify", "prod")
    assert result.exit_code == 8
    assert "reward:sort@1" in result.stderr
    assert json.loads(world("verify", "prod", "-o", "json").stdout)["ok"] is False


def spoil(world: World, digest: str) -> None:
    """Corrupt a blob."""
    body = digest.removeprefix("sha256:")
    (world.root / ".posttrain" / "blobs" / "sha256" / body[:2] / body[2:]).write_bytes(b"{}")


@pytest.mark.slow
def test_one_unreadable_manifest_hides_no_other_run(world: World) -> None:
    world.ship()
    bad = world.newest()
    spoil(world, world.json("get", bad)["manifest"])
    world.ok("plan", "run.yaml", "--seed", "18")
    world.ok("run", "run.yaml", "--seed", "18")
    rows = {run["id"]: run for run in world.json("ls")["runs"]}
    assert len(rows) == 2
    assert rows.pop(bad)["state"] == "succeeded", "a list reads no manifest"
    assert bad in world.ok("ls")
    assert "manifest unreadable: blob sha256:" in world.json("get", bad)["trouble"]
    shown = " ".join(world.ok("get", bad).split())
    assert "manifest unreadable" in shown
    assert f"posttrain verify {bad}" in shown
    checks = json.loads(world("doctor", "-o", "json").stdout)
    assert [c["finding"][: len(bad)] for c in checks if c["state"] == "fail" and c["name"] == "run"] == [bad]
    assert {c["name"]: c["state"] for c in checks}["jobs"] == "ok"


def test_a_corrupt_event_segment_does_not_end_whoever_watches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cli_world.train

    def train(folder: AttemptFolder, order: JobOrder) -> None:
        folder.events.mkdir(parents=True)
        (folder.events / "000001.jsonl").write_bytes(b'{"half a')
        real(folder, order)

    monkeypatch.setattr("cli_world.train", train)
    shown = world.ok("run", "run.yaml")
    assert "000001.jsonl cannot be read" in shown
    status = {stage["name"]: stage for stage in world.json("get", "sort")["stages"]}
    assert (status["grpo"]["step"], status["grpo"]["steps"]) == (6, 6)
    assert (world.root / ".posttrain" / "runs" / world.newest() / "curves.png").exists()


@pytest.mark.slow
def test_a_picture_has_the_loss_where_nothing_is_scored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of distillation without a reward, which tells how far it agrees with its teacher; a suite's point beside."""
    drawn: list[list[str]] = []

    def seen(path: Path, series: Sequence[CurveSeries], **options: Any) -> None:
        drawn.append(sorted({one.quantity for one in series}))
        learning_curve(path, series, **options)

    def metric(step: int, values: dict[str, float], at: float) -> Metric:
        told = {"agreement": 0.5, "response_tokens/mean": 7.0} if "reward/mean" in values else {}
        return Metric(step, {"loss": values["loss"], **told}, at)

    monkeypatch.setattr("posttrain.views.report.learning_curve", seen)
    world.ok("run", "run.yaml")
    monkeypatch.setattr(cli_world, "Metric", metric)
    world.ok("run", "run.yaml", "--seed", "18")
    assert drawn == [
        ["held-out accuracy", "training reward"],
        ["agreement with the teacher", "held-out accuracy", "response length (tokens)", "training loss"],
    ]


def test_a_lost_job_is_retried_and_told(world: World) -> None:
    world.broken["sft"] = [-9]
    world.ok("run", "run.yaml")
    told = world.json("why", "sort")
    assert [attempt["state"] for attempt in told["lost"]] == ["lost"]
    assert "attempt 1" in world.ok("why", "sort")


def test_every_line_that_does_not_run_has_a_reason_and_a_next_action(world: World) -> None:
    world.hold.add("grpo")
    result = world("run", "run.yaml", "--timeout", "60")
    assert result.exit_code == 12
    status = world.json("get", "sort")
    states = {stage["name"]: stage["state"] for stage in status["stages"]}
    assert states["grpo"] == "running"
    for stage in status["stages"]:
        assert stage["message"], stage
        assert stage["next_action"], stage
    assert status["driven"] is False
    assert status["next_action"].startswith("posttrain attach")
    assert "waits for grpo" in world.ok("get", "sort")


def test_stop_then_retry_goes_on(world: World) -> None:
    world.hold.add("grpo")
    world("run", "run.yaml", "--timeout", "60")
    assert "stopped" in world.ok("stop", "sort")
    stopped = world("run", "run.yaml", "--timeout", "60")  # the same command resumes it
    assert stopped.exit_code == 12
    world.ok("stop", "sort")
    world.hold.clear()
    assert "continues" in world.ok("retry", "sort")
    assert world.json("get", "sort")["state"] == "succeeded"
    assert world("stop", "sort").exit_code == 2


@pytest.mark.slow
def test_attach_drives_a_run_on_from_any_place_and_has_its_exit_code(world: World) -> None:
    world.hold.add("grpo")
    world("run", "run.yaml", "--timeout", "60")
    held = world("attach", "sort", "--timeout", "60")
    assert (held.exit_code, f"attached to run {world.newest()}: running" in held.stdout) == (12, True)
    world.ok("stop", "sort")
    assert world("attach", "sort").exit_code == 11  # a stopped run goes on by `retry`, never by a look at it
    world.hold.clear()
    world.ok("retry", "sort")
    done = world.ok("attach", "sort")
    assert f"attached to run {world.newest()}: succeeded" in done
    world.broken["sft"] = [1] * 5
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD))
    assert world("run", "run.yaml", "--seed", "4").exit_code == 6
    assert world("attach", "sort").exit_code == 6
    assert "there is no run 'sotr'" in world("attach", "sotr").stderr


def test_ctrl_c_detaches_and_says_how_to_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.cli.live.LineDisplay.__call__", interrupt)
    result = world("run", "run.yaml")
    run = world.newest()
    assert result.exit_code == 130
    for words in ("detached", "posttrain run run.yaml", f"posttrain get {run} --watch", f"posttrain stop {run}"):
        assert words in result.stdout
    monkeypatch.undo()


def test_a_failed_run_says_what_to_do(world: World) -> None:
    world.broken["sft"] = [1, 1, 1, 1, 1]
    result = world("run", "run.yaml")
    assert result.exit_code == 6
    assert "posttrain logs" in result.stderr
    assert world.json("get", "sort")["state"] == "failed"


def test_reports_are_made_again_and_short_ids_do(world: World) -> None:
    world.ship()
    run = world.newest()
    report = world.root / ".posttrain" / "runs" / run / "report.html"
    report.unlink()
    shown = world.ok("get", run[:7], "--report")
    assert report.exists()
    assert str(report) in shown
    assert world.json("get", run[:7], "--report")["report"] == str(report)


@pytest.mark.parametrize("words", [("logs", "sort", "-f"), ("get", "sort", "--watch")])
def test_watching_a_run_that_nobody_drives_says_so_and_ends(world: World, words: tuple[str, ...]) -> None:
    world.hold.add("grpo")
    world("run", "run.yaml", "--timeout", "60")
    result = world(*words, "--timeout", "75.5")
    assert result.exit_code == 12
    told, error = result.stderr.splitlines()
    assert told.startswith(f"no process drives this run (running); posttrain attach {world.newest()}")
    assert error.startswith("error: ")
    assert "still running after 75.5 s of watching" in error
    assert world(*words[:2], "--timeout", "60").exit_code == 2


def test_being_left_alone_is_told_once_each_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.views.logs._ALONE", 0.0)
    world.hold.add("sft")
    world("run", "run.yaml", "--timeout", "60")
    workspace, told = Workspace(world.root / ".posttrain"), []
    watch_run = RunWatch(workspace, world.newest(), told.append, None)
    counts = []
    for _ in range(2):
        workspace.reconciler.tick(world.newest())  # this process drives it
        watch_run.look()
        counts.append(len(told))
        workspace.reconciler.release(world.newest())
        watch_run.look()
        watch_run.look()
        counts.append(len(told))
    assert counts == [0, 1, 1, 2]
    workspace.close()


def test_watching_an_ended_run_returns(world: World) -> None:
    world.ship()
    assert "succeeded" in world.ok("get", "sort", "--watch")
    assert "grpo says hello" in world.ok("logs", "sort", "-f")


def test_every_row_of_the_ledger_is_what_an_event_said(story: tuple[World, dict[str, str]]) -> None:
    workspace = Workspace(story[0].root / ".posttrain")
    assert verify_rows(workspace.ledger) >= 29  # as many as the three runs alone leave
    workspace.close()


def test_python_submits_a_locked_manifest_too(world: World) -> None:
    world.ok("lock", "run.yaml")
    workspace = open_workspace(world.root)
    first = submit(world.root / "run.yaml", workspace=workspace)
    again = submit(world.root / "run.lock.json", workspace=workspace)
    assert (again.id, again.attached) == (first.id, True)
    with pytest.raises(InputError, match="is a locked manifest"):
        plan(world.root / "run.lock.json", workspace)
    workspace.close()


def test_python_takes_settings_by_path_or_in_pairs(world: World) -> None:
    workspace = open_workspace(world.root)
    run_file = world.root / "run.yaml"
    found = [plan(run_file, workspace, setting=one).manifest for one in ({"sft.steps": 7}, (("sft.steps", 7),))]
    assert found[0] == found[1]
    assert found[0].stage("sft").params["steps"] == 7
    for wrong in ("sft.steps=7", ["sft.steps"], [("sft.steps", 7, 8)], 5, [5]):
        with pytest.raises(InputError, match=r'setting must map paths to values, such as {"grpo.steps": 100}, got '):
            plan(run_file, workspace, setting=wrong)  # type: ignore[arg-type]
    workspace.close()


def test_several_files_are_one_data_set(world: World) -> None:
    world.write("more.csv", "prompt,answer\nQ,007\n")
    assert "dataset:all@1" in world.ok("asset", "add", "dataset:all", "train.jsonl", "more.csv")
    assert "dataset:all@1" in world.ok("asset", "add", "dataset:all", "more.csv", "train.jsonl")
    shown = world.ok("asset", "get", "dataset:all")
    assert "(tree)" in shown
    assert "csv jsonl" in shown
    refused = world("asset", "add", "reward:two", "reward.py", "more.csv")
    assert refused.exit_code == 2
    assert "a reward must be one file or folder, got 2 paths" in refused.stderr
