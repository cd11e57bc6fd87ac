"""A job may put anything into its attempt folder: that is its own failure, and stalls nobody who reads it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from control_bench import TRAIN_ONLY, Bench, train

from posttrain.control import actions
from posttrain.domain.adapters import CONFIG, FOLDER, WEIGHTS
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.jobs import Note, Sample
from posttrain.execution.environment import read_log
from posttrain.store.atomic import ANSWER, LINE, SMALL, look_over
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.retries import read_access
from posttrain.store.trees import remove_tree, scratch, tree_digest

DEEP = 1500  # folders in each other: more than a function may call itself
Leave = Callable[[AttemptFolder], Any]


@pytest.fixture(autouse=True)
def _cleared(tmp_path: Path) -> Iterator[None]:
    """Pytest itself cannot remove folders that lie so deep in each other; nor can whoever is tried here be trusted."""
    yield
    subprocess.run(["chmod", "-R", "u+rwx", str(tmp_path)], check=False)
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, {"sft": [train()]})


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    return AttemptFolder(tmp_path)


def deep(at: Path, levels: int = DEEP) -> None:
    at.mkdir(parents=True, exist_ok=True)
    with chdir(at):
        for _ in range(levels):
            os.mkdir("d")
            os.chdir("d")
        Path("last").touch()


def instead(path: Path, kind: str) -> None:
    """Something else than a plain file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
        (path / "x").touch()
    elif kind == "link":
        (path.parent / "secret").write_text("[1]")
        path.symlink_to("secret")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as one, chdir(path.parent):
            one.bind(path.name)


def answered(**words: Any) -> Leave:
    """A job that answers with these words."""

    def leave(folder: AttemptFolder) -> None:
        said = {"status": "succeeded", "outputs": {}, "metrics": {}, "tokens": 1, "seconds": 0.0, "failure": None}
        folder.path.joinpath("result.json").write_text(json.dumps({**said, **words}))

    return leave


def output(make: Callable[[Path], Any], form: str = "tree", over: str = "") -> Leave:
    """A job whose model is something else, or extends the model of an input."""

    def leave(folder: AttemptFolder) -> None:
        folder.outputs.mkdir(parents=True)
        make(folder.outputs / "model")
        answered(outputs={"model": {"path": "outputs/model", "form": form, "over": over}})(folder)

    return leave


def adapter(path: Path) -> None:
    path.joinpath(FOLDER).mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        path.joinpath(FOLDER, name).touch()


def sparse(path: Path, size: int = 10 << 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def then(*leaves: Leave) -> Leave:
    def leave(folder: AttemptFolder) -> None:
        for one in leaves:
            one(folder)

    return leave


def put(name: str, kind: str) -> Leave:
    return lambda folder: instead(folder.path / name, kind)


def file(name: str, data: str) -> Leave:
    def leave(folder: AttemptFolder) -> None:
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(data)

    return leave


FAILED: dict[str, Leave] = {
    "tokens in words": answered(tokens="many"),
    "tokens no row holds": answered(tokens=10**30),
    "no seconds": answered(seconds=None),
    "seconds NaN": answered(seconds=float("nan")),
    "status won": answered(status="won"),
    "status a list": answered(status=[1]),
    "metrics a list": answered(metrics=[1]),
    "metrics in words": answered(metrics={"x": "y"}),
    "outputs a list": answered(outputs=[1]),
    "output path 5": answered(outputs={"model": {"path": 5, "form": "tree"}}),
    "output path NUL": answered(outputs={"model": {"path": "outputs/\0", "form": "tree"}}),
    "output path too long": answered(outputs={"model": {"path": "outputs/" + "x" * 300, "form": "tree"}}),
    "failure in a list": answered(status="failed", failure=[1]),
    "a list": file("result.json", "[1]"),
    "lists in lists": file("result.json", "[" * 100_000),
    "large": file("result.json", "[" + "{}," * (ANSWER // 3) + "{}]"),
    **{f"result is a {kind}": put("result.json", kind) for kind in ("folder", "link", "fifo", "socket")},
    "deep output": output(deep),
    "sparse output": output(sparse, "file"),
    "sparse output of few": output(lambda path: sparse(path, 3 << 30), "file"),
    "fifo in an output": output(lambda path: instead(path / "x", "fifo")),
    "socket as an output": output(lambda path: instead(path, "socket"), "file"),
    "adapter of a data set": output(adapter, over="data"),
    "adapter of another slot": output(adapter, over="elsewhere"),
    "adapter as a file": output(Path.touch, "file", over="model"),
    "more than an adapter": output(lambda path: [adapter(path), (path / "config.json").touch()], over="model"),
}


@pytest.mark.parametrize("leave", FAILED.values(), ids=FAILED)
def test_what_cannot_be_collected_is_the_jobs_failure(bench: Bench, leave: Leave) -> None:
    bench.scripts["sft"] = [leave]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    stage = bench.stage(run.id, "sft")
    assert (run.state, stage.state) == ("failed", "failed"), stage.message
    assert "the outputs of the job cannot be collected" in stage.message
    assert bench.ledger.attempts(run.id)[0].tokens <= 1


PROGRESS = '{"type": "progress", "step": 1, "total": 1, "phase": "x", "tokens": "y", "at": 1}'
BESIDE: dict[str, Leave] = {
    "events/1²": file("events/1²", "x"),
    "progress in words": file(
        "events/000009.jsonl", '{"type":"progress","step":1,"total":1,"phase":"x","tokens":"y","at":1}'
    ),
    "packs of odd lengths": file("events/packs/000001", json.dumps({"lengths": ["a"] * 64}) + "\n"),
    "lengths below 0": file("events/packs/000001", json.dumps({"lengths": [-1, 1] * 32}) + "\n"),
    "negative meter": file("meter", "-5 -7"),
    "large meter": file("meter", "9" * 30 + " " + "9" * 30),
    **{
        f"{name} is a {kind}": put(name, kind)
        for name in ("meter", "summary.json", "start.json", "control.json", "events")
        for kind in ("folder", "socket")
    },
}


@pytest.mark.parametrize("leave", BESIDE.values(), ids=BESIDE)
def test_what_lies_beside_a_good_result_keeps_no_run_from_ending(bench: Bench, leave: Leave) -> None:
    bench.scripts["sft"] = [then(train(), _clear, leave)]
    assert bench.drive(bench.submit(**TRAIN_ONLY)).state == "succeeded"


@pytest.mark.parametrize("leave", BESIDE.values(), ids=BESIDE)
def test_a_run_is_stopped_whatever_its_job_put_into_its_folder(bench: Bench, leave: Leave) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    leave(bench.jobs.folders.of(attempt))
    instead(Path(attempt.folder) / "controls", "socket")
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state in ("stopped", "failed")


def _clear(folder: AttemptFolder) -> None:
    """Room for something else."""
    for name in ("meter", "summary.json", "start.json", "control.json", "events"):
        path = folder.path / name
        remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)


CHECKPOINT = "checkpoints/step-00000001"
STATES = ("[1]", '{"tokens": "x"}', '{"tokens": 1e999}', '{"tokens": -1}', "[" * 100_000)


@pytest.mark.parametrize("state", STATES)
def test_a_checkpoint_whose_state_makes_no_sense_does_not_count(bench: Bench, state: str) -> None:
    def leave(folder: AttemptFolder) -> int:
        file(f"{CHECKPOINT}/state.json", state)(folder)
        shards = {"state.json": digest_bytes(state.encode())}
        said = {"format": "posttrain.checkpoint/1", "step": 1, "shards": shards}
        file(f"{CHECKPOINT}/COMMIT", json.dumps(said))(folder)
        return -9

    bench.scripts["sft"] = [leave, train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert run.state == "succeeded"
    assert bench.ledger.attempts(run.id)[1].resume is None


@pytest.mark.parametrize("commit", ['{"step": 1e999}', '{"step": 1, "shards": {"/dev/zero": "x"}}', "[" * 100_000])
def test_a_commit_of_other_things_does_not_count(folder: AttemptFolder, commit: str) -> None:
    file(f"{CHECKPOINT}/COMMIT", commit.replace("{", '{"format": "posttrain.checkpoint/1",', 1))(folder)
    assert folder.checkpoint_steps() == [1]
    assert folder.checkpoint(1) is None


@pytest.mark.parametrize("kind", ["folder", "link", "fifo", "socket"])
def test_nobody_follows_a_log_elsewhere_nor_waits_for_one(folder: AttemptFolder, kind: str) -> None:
    instead(folder.log, kind)
    instead(folder.path / "access.json", kind)
    for read in (lambda: read_log(folder.log), lambda: read_access(folder.path)):
        with pytest.raises(IntegrityError):
            read()


@pytest.mark.parametrize("key", ["start.json", "controls/000001.json", "summary.json", "result.json"])
def test_what_is_too_large_for_its_kind_is_not_read(folder: AttemptFolder, key: str) -> None:
    sparse(folder.path / key, 1 + (ANSWER if key == "result.json" else SMALL))
    with pytest.raises(IntegrityError, match="must have at most"):
        folder.mailbox._objects.get(key)


@pytest.mark.slow
def test_segments_are_as_large_as_may_be_read_whatever_is_recorded(folder: AttemptFolder) -> None:
    """Large samples come in several segments; one that is larger than any may be is told of."""
    words = "x" * (LINE // 2)
    sample = Sample("0", 0, "", words, (), (), (), False, (), 0.0, "")
    with EventWriter(folder) as sink:
        for _ in range(3):
            sink(sample)
        sink(Sample("1", 0, "", words * 3, (), (), (), False, (), 0.0, ""))
        sink(Note("last", 0.0))
    assert [one.response == words for one in folder.recorded_samples()] == [True] * 3
    said = [fact.message for fact in folder.facts()[0] if isinstance(fact, Note)]
    assert [message == "last" or "is left out" in message for message in said] == [True, True]
    assert len(list(folder.samples.glob("*.jsonl"))) > 1


def test_deep_folders_are_refused_and_removed(tmp_path: Path) -> None:
    with scratch(tmp_path / "scratch", ".new-") as made:
        deep(made / "deep")
        for look in (lambda: look_over(made), lambda: tree_digest(made)):
            with pytest.raises((InputError, IntegrityError), match="nested folders"):
                look()
    assert not any((tmp_path / "scratch").iterdir())


def test_a_folder_is_removed_whoever_may_enter_it(tmp_path: Path) -> None:
    deep(tmp_path / "gone" / "shut", 3)
    (tmp_path / "kept").mkdir()
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "shut" / "d").chmod(0)
    remove_tree(tmp_path / "gone")
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
