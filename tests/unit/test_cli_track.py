"""Trackers as a person chooses and looks at them: `init --tracker`, `trackers:`, plan, run, get, why, track."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN, World, make_world

from posttrain.app.workspace import Workspace, open_workspace
from posttrain.domain.errors import TrackerError
from posttrain.domain.jobs import Metric
from posttrain.domain.trackers import Trackers
from posttrain.store.atomic import write_json
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.trackers import choice, writer
from posttrain.trackers.rows import RunSource
from posttrain.trackers.writer import Scribe

START = Scribe.start


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A prepared workspace whose drivers start no process beside them: tests call `track`."""
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    monkeypatch.setattr(Scribe, "start", lambda self: None)
    return made


def points(path: Path) -> list[tuple[str, str, int, float]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["stage"], row["metric"], int(row["step"]), float(row["value"])) for row in rows]


def tracker(world: World, run: str) -> Any:
    (one,) = world.json("get", run)["trackers"]
    return one


def test_the_workspaces_trackers_are_those_of_its_runs(world: World) -> None:
    assert "tracker csv:" in world.ok("init", "--tracker", "csv")
    assert f"tracker:  csv: {world.root}/.posttrain/tracking/csv" in world.ok("plan", "run.yaml")
    world.ok("run", "run.yaml")
    run = world.newest()
    assert "posttrain track" in tracker(world, run)["message"]
    assert "csv written" in world.ok("track", run)
    found = points(world.root / ".posttrain" / "tracking" / "csv" / f"{run}.csv")
    assert [p[2:] for p in found if p[:2] == ("grpo", "loss")] == [(step, 1 / step) for step in range(1, 7)]
    assert ("evaluate", "heldout/accuracy", 0, 0.98) in found
    assert ("gate", "accuracy/passed", 0, 1.0) in found
    assert tracker(world, run)["state"] == "written"
    assert "tracker: csv written" in world.ok("get", run)
    world.ok("track", run)
    assert points(world.root / ".posttrain" / "tracking" / "csv" / f"{run}.csv") == found


def test_trackers_decide_nothing(world: World) -> None:
    plain = world.json("plan", "run.yaml")["digest"]
    world.write("run.yaml", RUN + "trackers: {csv: here, tensorboard: null}\n")
    if choice._installed("tensorboard"):
        assert world.json("plan", "run.yaml")["digest"] == plain
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    assert world.json("plan", "run.yaml")["trackers"] == [{"kind": "csv", "where": str(world.root / "here")}]
    assert world.json("plan", "run.yaml")["digest"] == plain
    world.ok("run", "run.yaml")
    run = world.newest()
    world.write("run.yaml", RUN + "trackers: [parquet]\n")  # the same run, written elsewhere from now on
    assert "attached" in world.ok("run", "run.yaml")
    assert tracker(world, run)["kind"] == "parquet"
    world.write("run.yaml", RUN)
    world.ok("run", "run.yaml")
    assert tracker(world, run)["kind"] == "parquet", "who names none leaves what was chosen"


def test_a_run_may_have_none_where_the_workspace_has_some(world: World) -> None:
    world.ok("init", "--tracker", "csv")
    world.write("run.yaml", RUN + "trackers: []\n")
    assert world.json("plan", "run.yaml")["trackers"] == []
    world.ok("run", "run.yaml")
    assert world.json("get", world.newest())["trackers"] == []
    refused = world("track", world.newest())
    assert refused.exit_code == 2
    assert "has no tracker" in refused.stderr
    added = world.ok("track", world.newest(), "--tracker", "csv=late")
    assert f"csv written: {world.root}/late" in added
    world.ok("init", "--tracker", "none")
    assert world.ok("init").count("tracker") == 0


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ("[nope]", "nope: unknown key (known: csv, mlflow, parquet, tensorboard, wandb)"),
        ("[csv, csv]", "must name each tracker once"),
        ("{csv: {folder: x}}", "folder: unknown key"),
        ("{mlflow: {uri: x}}", "did you mean 'tracking_uri'?"),
        ("{mlflow: 'http://me:secret@host'}", "must contain no credentials"),
        ("{wandb: {mode: sometimes}}", "must be one of 'offline', 'online'"),
        ("7", "trackers"),
        ("{wandb: {project: 'a/b/c'}}", "trackers.wandb.project: must be at most 128 letters, digits"),
        ('{mlflow: {experiment: "it\'s"}}', "trackers.mlflow.experiment: must be at most 128 letters, digits"),
        ("{csv: {dir: ''}}", "trackers.csv.dir"),
        ("{csv: train.jsonl}", "is a file; choose another folder"),
        ("{csv: train.jsonl/deeper}", "is a file; choose another folder"),
        ("{mlflow: 'ftp://host'}", "tracking_uri must be a folder or begin with http"),
        ("{wandb: {mode: online}}", "WANDB_API_KEY is not set"),
        ("'mlflow=http://u:secret@h'", "trackers.mlflow=…: unknown key"),
        ("['mlflow=http://u:secret@h']", "trackers.mlflow=…: unknown key"),
        ("['http://u:secret@h', 'http://u:secret@h']", "must name each tracker once, got 'http://…' twice"),
        ("{'http://u:secret@h': {}}", "trackers.http://…: unknown key"),
        ("{mlflow: {'tracking_uri=http://u:secret@h': 1}}", "did you mean 'tracking_uri'?"),
        ("{wandb: 'http://u:secret@h'}", "trackers.wandb.project: must be at most 128 letters"),
        ("{mlflow: {experiment: 'http://u:secret@h'}}", "trackers.mlflow.experiment: must be at most 128 letters"),
        ("{mlflow: 'ftp://u:secret@h'}", "must contain no credentials"),
    ],
)
def test_a_tracker_that_cannot_be_written_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, trackers: str, said: str
) -> None:
    monkeypatch.setattr(choice, "_installed", lambda package: True)
    monkeypatch.delenv(choice.KEY, raising=False)
    world.write("run.yaml", RUN + f"trackers: {trackers}\n")
    for command in ("plan", "run"):
        refused = world(command, "run.yaml")
        assert refused.exit_code == 2
        assert said in refused.stderr
        assert "secret" not in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("mlfow=http://u:secret@h",), ("mlflow=http://u:secret@h", "mlflow"), ("http://u:secret@h",)]
)
def test_no_password_of_a_mistyped_word_is_printed(world: World, words: tuple[str, ...]) -> None:
    refused = world("init", *(part for word in words for part in ("--tracker", word)))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "secret" not in refused.stderr


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_told_with_the_command_that_brings_it(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(choice, "_installed", lambda package: False)
    (world.root / kind).mkdir()  # a folder of that name, as wandb makes one, is no package
    world.write("run.yaml", RUN + f"trackers: [{kind}]\n")
    for words in (("plan", "run.yaml"), ("run", "run.yaml"), ("init", "--tracker", kind)):
        refused = world(*words)
        assert refused.exit_code == 2
        assert f"pip install 'posttrain[{kind}]'" in refused.stderr


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nosuchtracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not choice._installed("nosuchtracker")
    assert choice._installed("json")


def test_a_redone_step_counts_once_and_is_told_where_it_differs(world: World) -> None:
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    attempt = AttemptFolder(world.root / ".posttrain" / "runs" / run / "sft" / "001")
    with EventWriter(attempt) as sink:  # what an attempt that resumed from step 2 would say
        for step, loss in ((3, 1 / 3), (4, 0.2), (5, 0.15)):
            sink(Metric(step, {"loss": loss}, 1.0))
    said = world.ok("track", run)
    found = [p[2:] for p in points(world.root / "here" / f"{run}.csv") if p[:2] == ("sft", "loss")]
    assert found == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.15)]
    assert "1 values of repeated steps differ from the first values, which were kept" in said
    assert "sft/loss at step 4: first 0.25, redone 0.2" in tracker(world, run)["message"]


def test_trouble_is_one_line_and_hurts_neither_run_nor_other_trackers(world: World) -> None:
    world.write("run.yaml", RUN + "trackers: {csv: here, parquet: there}\n")
    (world.root / "there").mkdir()
    world.ok("run", "run.yaml")
    run = world.newest()
    (world.root / "there" / f"{run}.parquet").write_bytes(b"somebody's")
    failed = world("track", run)
    assert failed.exit_code == 6
    assert failed.stderr.count("\n") == 1
    assert f"tracker parquet: {world.root}/there/{run}.parquet: cannot be read" in failed.stderr
    assert len(points(world.root / "here" / f"{run}.csv")) > 20
    shown = world.ok("get", run)
    assert shown.count("warning: tracker parquet") == 1
    assert "tracker: csv written" in shown
    assert f"posttrain track {run} writes the missing data" in world.ok("why", run)
    assert world.json("get", run)["state"] == "succeeded"
    (world.root / "there" / f"{run}.parquet").unlink()
    world.ok("track", run)
    assert "warning" not in world.ok("get", run)


def test_a_damaged_segment_is_told_and_the_rest_is_written(world: World) -> None:
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    events = world.root / ".posttrain" / "runs" / run / "sft" / "001" / "events"
    (events / "000001.jsonl").write_text("{half")
    assert "parts could not be read and are missing" in world.ok("track", run)
    assert {p[0] for p in points(world.root / "here" / f"{run}.csv")} == {"grpo", "evaluate", "gate"} | (
        {"sft"} if len(list(events.iterdir())) > 1 else set()
    )


def test_a_reused_stage_is_written_from_where_it_was_computed(world: World) -> None:
    world.ok("run", "run.yaml")
    world.write("run.yaml", RUN.replace("name: sort", "name: other") + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    world.ok("track", run)
    found = points(world.root / "here" / f"{run}.csv")
    assert len([p for p in found if p[0] == "sft"]) == 4
    assert ("evaluate", "heldout/accuracy", 0, 0.98) in found


def test_what_only_a_stages_result_says_is_written_and_the_best_model_is_named_as_in_the_file(world: World) -> None:
    best = (
        RUN.replace("data: {train", "data: {tune: dataset:train, train")
        .replace(
            "probe: {data: heldout, every: 2, items: 8}", "probe: {data: tune, every: 2, items: 8}, keep_best: true"
        )
        .replace("model: grpo, suites", "model: grpo/best, suites")
        .replace("model: grpo}", "model: grpo/best}")
    )
    world.write("run.yaml", best + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    world.ok("track", run)
    found = points(world.root / "here" / f"{run}.csv")
    assert sorted(p for p in found if "best/" in p[1]) == [
        ("grpo", "best/probe/accuracy", 2, 0.875),
        ("grpo", "best/step", 2, 2.0),
    ]
    world.ok("track", run)
    assert points(world.root / "here" / f"{run}.csv") == found
    workspace = Workspace(world.root / ".posttrain")
    params = RunSource(workspace, run).about().params
    workspace.close()
    assert params["evaluate.model"] == "grpo/best"
    assert params["grpo.model"] == "sft"


def test_what_was_chosen_after_a_run_is_no_warning_of_it(world: World) -> None:
    world.ok("run", "run.yaml")
    run = world.newest()
    world.ok("init", "--tracker", "csv")
    shown = world.ok("get", run)
    assert "warning" not in shown
    said = f"the tracker was chosen after the run was submitted; posttrain track {run} writes the data"
    assert (tracker(world, run)["state"], tracker(world, run)["message"]) == ("not written", said)
    assert "csv written" in world.ok("track", run)
    assert tracker(world, run)["state"] == "written"


def test_a_server_that_is_away_is_one_short_line_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_installed", lambda package: True)  # it is not asked for: nobody is there
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    world.write("run.yaml", RUN + f"trackers: {{mlflow: '{uri}'}}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    failed = world("track", run)
    assert failed.exit_code == 6
    away = f"cannot reach {uri}: connection refused"
    assert failed.stderr == f"error: run {run}: tracker mlflow: {away}; posttrain track {run} tries again\n"
    assert tracker(world, run)["message"] == f"{away}; posttrain track {run} writes the missing data"
    with open(world.root / ".posttrain" / "runs" / run / choice.LOCK, "w") as lock:  # its writer tries again
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tracker(world, run)["message"] == f"{away}; posttrain track {run} writes it later"


def test_what_a_client_says_of_a_server_is_cut_to_its_cause() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    urllib3 = RuntimeError("HTTPConnectionPool(host='127.0.0.1', port=1): Max retries exceeded")
    urllib3.reason = RuntimeError("Failed to establish a new connection")  # type: ignore[attr-defined]
    urllib3.reason.__cause__ = refused  # type: ignore[attr-defined]
    client = RuntimeError(f"API request to http://127.0.0.1:1 failed with exception {urllib3}")
    client.__cause__ = urllib3
    assert choice.line(client, "http://127.0.0.1:1") == "cannot reach http://127.0.0.1:1: connection refused"
    assert choice.line(RuntimeError("a b\nc"), "x") == "RuntimeError: a b c"


def test_another_place_is_written_beside_the_runs_own(world: World) -> None:
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    said = world.ok("track", run, "--tracker", "csv=elsewhere", "--tracker", "parquet=columns")
    assert f"csv written: {world.root}/elsewhere" in said
    assert f"parquet written: {world.root}/columns" in said
    assert not (world.root / "here").exists(), "what was not asked for is not written"
    known = {one["kind"]: (one["state"], one["where"]) for one in world.json("get", run)["trackers"]}
    assert known["csv"][0] == "trouble"
    assert known["csv"][1] == f"{world.root}/here"
    assert known["parquet"] == ("written", f"{world.root}/columns/{run}.parquet")
    world.ok("track", run)
    own = points(world.root / "here" / f"{run}.csv")
    assert points(world.root / "elsewhere" / f"{run}.csv") == own
    world.ok("track", run, "--tracker", "csv=elsewhere")
    assert points(world.root / "elsewhere" / f"{run}.csv") == own


def test_another_place_has_what_there_is_of_a_run_that_goes_on(world: World) -> None:
    world.hold.add("grpo")
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world("run", "run.yaml", "--timeout", "300")
    run = world.newest()
    with open(world.root / ".posttrain" / "runs" / run / choice.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its own writer is at work
        said = world.json("track", run, "--tracker", "csv=else where")["trackers"]
    assert said[0]["message"] == (
        f"all data so far; posttrain track {run} --tracker 'csv={world.root}/else where' writes later data"
    )
    assert {p[0] for p in points(world.root / "else where" / f"{run}.csv")} == {"sft"}
    assert not (world.root / "here").exists()


@pytest.mark.parametrize("kinds", ["[]", "{csv: here}"])
def test_a_place_that_cannot_be_written_is_not_recorded(world: World, kinds: str) -> None:
    world.write("run.yaml", RUN + f"trackers: {kinds}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    before = (world.root / ".posttrain" / "runs" / run / choice.RECORD).read_text()
    shown = world.json("get", run)["trackers"]
    (world.root / "mine" / f"{run}.csv").mkdir(parents=True)
    for place, code in (("/proc/nowhere", 2), ("train.jsonl", 2), ("mine", 6)):
        refused = world("track", run, "--tracker", f"csv={place}")
        assert refused.exit_code == code, refused.stderr
        assert refused.stderr.count("\n") == 1
        assert (world.root / ".posttrain" / "runs" / run / choice.RECORD).read_text() == before
        assert world.json("get", run)["trackers"] == shown


def test_one_process_writes_a_run_at_a_time(world: World) -> None:
    world.hold.add("grpo")
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world("run", "run.yaml", "--timeout", "300")
    run = world.newest()
    folder = world.root / ".posttrain" / "runs" / run
    with open(folder / choice.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "csv writing" in world.ok("track", run)
        assert not (world.root / "here").exists()
    assert "csv waiting" in world.ok("track", run)  # the run goes on, and so does what is written of it
    assert {p[0] for p in points(world.root / "here" / f"{run}.csv")} == {"sft"}


def test_a_target_is_of_one_workspace(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    world.write("run.yaml", RUN + f"trackers: {{csv: {shared}}}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    world.ok("track", run)
    written = points(shared / f"{run}.csv")
    identity = json.loads((world.root / ".posttrain" / "workspace.json").read_text())["id"]
    assert (shared / f".{run}.csv.writer").read_text() == f"{identity}\n"
    world.ok("init", "--tracker", "csv")
    assert json.loads((world.root / ".posttrain" / "workspace.json").read_text())["id"] == identity
    shutil.copytree(world.root / ".posttrain", tmp_path / "copy" / ".posttrain")
    shutil.copytree(world.root / ".posttrain", tmp_path / "second" / ".posttrain")
    settings = tmp_path / "second" / ".posttrain" / "workspace.json"  # as if it had been copied before it had an id
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "id": ""}))
    second = make_world(tmp_path / "second", monkeypatch)
    assert second.newest() == run
    refused = second("track", run)
    assert (refused.exit_code, refused.stderr.count("\n")) == (TrackerError.exit_code, 1)
    assert f"another workspace has written its run {run} to this location; name a different location" in refused.stderr
    assert tracker(second, run)["state"] == "trouble"
    assert points(shared / f"{run}.csv") == written
    second.ok("track", run, "--tracker", f"csv={tmp_path / 'elsewhere'}")
    assert [p[:3] for p in points(tmp_path / "elsewhere" / f"{run}.csv")] == [p[:3] for p in written]
    monkeypatch.setenv("POSTTRAIN_WORKSPACE", str(tmp_path / "copy" / ".posttrain"))
    second.ok("track", run)  # a copy is the same workspace
    (shared / f"{run}.csv").unlink()
    monkeypatch.setenv("POSTTRAIN_WORKSPACE", str(second.root / ".posttrain"))
    second.ok("track", run, "--tracker", f"csv={shared}")  # what was taken away is nobody's


def test_an_identity_is_one_whoever_asks_first(world: World) -> None:
    path = world.root / ".posttrain" / "workspace.json"
    before = json.loads(path.read_text())
    assert "id" not in before
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda _: open_workspace(world.root).identity(), range(8)))
    assert len(set(asked)) == 1
    assert json.loads(path.read_text()) == {**before, "id": asked[0]}


def test_what_was_recorded_by_hand_is_checked(world: World) -> None:
    path = world.root / ".posttrain" / "workspace.json"
    write_json(path, {**json.loads(path.read_text()), "trackers": ["csv", "nope"]})
    refused = world("plan", "run.yaml")
    assert refused.exit_code == 2
    assert "workspace.json: trackers" in refused.stderr


def test_a_workspace_that_moved_keeps_its_trackers(world: World) -> None:
    world.ok("init", "--tracker", "csv")
    (world.root / ".posttrain").rename(world.root / "moved")
    moved = Workspace(world.root / "moved")
    assert choice.of_workspace(moved).to_json() == {"csv": {"dir": f"{world.root}/moved/tracking/csv"}}
    moved.close()


def test_a_full_disk_is_told_and_the_rest_follows_once_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run, room, write = world.newest(), [500], os.write

    def written(file: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{file}").endswith(".csv"):
            return write(file, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", written)
        failed = world("track", run)
    assert failed.exit_code == 6
    assert "the disk is full; free some space" in failed.stderr
    assert failed.stderr.count("\n") == 1
    cut = (world.root / "here" / f"{run}.csv").read_bytes()
    assert not cut.endswith(b"\n")
    assert f"posttrain track {run} writes the missing data" in world.ok("why", run)
    world.ok("track", run)
    found = [p[:3] for p in points(world.root / "here" / f"{run}.csv")]
    assert len(found) == len(set(found)) > 20
    assert "warning" not in world.ok("get", run)


def test_a_record_that_cannot_be_read_keeps_no_command_from_looking(world: World) -> None:
    world.write("run.yaml", RUN + "trackers: {csv: here}\n")
    world.ok("run", "run.yaml")
    run = world.newest()
    record = world.root / ".posttrain" / "runs" / run / "trackers.json"
    record.write_text("{half")
    assert "trackers.json is not JSON" in world.ok("get", run)
    assert world("track", run).exit_code == 8


WORDS: dict[str, dict[str, Any]] = {
    "csv": {"dir": "/curves"},
    "parquet": {"dir": "/curves"},
    "tensorboard": {"logdir": "/curves"},
    "mlflow": {
        "tracking_uri": "http://host:5000",
        "experiment": "/Users/ada@lab.org/sort",
        "registered_model": "sorter",
    },
    "wandb": {"project": "sort", "entity": "team", "mode": "online", "dir": "/curves"},
}


def test_every_word_of_every_tracker_is_taken_and_recorded(tmp_path: Path) -> None:
    assert set(Trackers.model_fields) == set(WORDS)
    for kind, words in WORDS.items():
        (field,) = [field for field in Trackers.model_fields[kind].annotation.__args__ if field is not type(None)]
        assert set(field.model_fields) == set(words), kind
    chosen = choice.parse_trackers(WORDS, "run.yaml")
    assert choice.resolved(chosen, tmp_path, tmp_path).to_json() == WORDS
    assert choice.parse_trackers({kind: next(iter(words.values())) for kind, words in WORDS.items()}, "x").chosen()


@pytest.mark.parametrize("given", ["team/sort", {"project": "team/sort"}, {"project": "sort", "entity": "team"}])
def test_a_project_may_be_named_with_its_entity(given: Any) -> None:
    found = choice.parse_trackers({"wandb": given}, "run.yaml").to_json()["wandb"]
    assert (found["project"], found["entity"]) == ("sort", "team")


def test_what_moves_with_a_folder_is_relative_to_it(tmp_path: Path) -> None:
    raw = {"csv": "a", "mlflow": "sqlite:///b.db", "tensorboard": {"logdir": "~/c"}}
    found = choice.resolved(choice.parse_trackers(raw, "x"), tmp_path, tmp_path / "w").to_json()
    assert found["csv"]["dir"] == f"{tmp_path}/a"
    assert found["mlflow"]["tracking_uri"] == f"sqlite:///{tmp_path}/b.db"
    assert found["tensorboard"]["logdir"] == str(Path.home() / "c")
    own = choice.resolved(choice.parse_trackers(list(WORDS), "x"), tmp_path, tmp_path / "w").to_json()
    assert own["mlflow"]["tracking_uri"] == f"sqlite:///{tmp_path}/w/tracking/mlflow.db"
    assert own["wandb"] == {"project": "posttrain", "mode": "offline", "dir": f"{tmp_path}/w/tracking"}


def test_a_lock_that_somebody_only_looks_at_delays_the_writer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ok("init", "--tracker", "csv")
    world.ok("run", "run.yaml")
    run, started = world.newest(), list[list[str]]()

    class Writer:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)

        def poll(self) -> int | None:
            return None

    monkeypatch.setattr(writer.subprocess, "Popen", Writer)
    monkeypatch.setattr(writer, "_POLL", 0.0)
    monkeypatch.setattr(Scribe, "start", START)
    with open(world.root / ".posttrain" / "runs" / run / choice.LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        scribe = Scribe(open_workspace(), run)
        for _ in range(5):  # more often than a writer that dies is started
            scribe.keep()
        assert not started
    scribe.keep()
    scribe.keep()
    assert len(started) == 1
