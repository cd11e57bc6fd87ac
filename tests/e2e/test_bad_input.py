"""Every kind of bad input, through the public command: one line on stderr that names file, field, constraint and value,
the documented exit code, and nothing written.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from tiny_run import RUN
from workbench import Finished, Workbench

from posttrain.store.trees import tree_listing

pytestmark = [pytest.mark.slow, pytest.mark.journey]

RAISES = '''
def score(completion: str) -> float:
    """Guideline: none."""
    return 1.0 / len("")
'''
NAN = '''
def score(completion: str) -> float:
    """Guideline: none."""
    return float("nan")
'''
TOO_FEW = '''
def score(prompts: list[str], completions: list[str]) -> list[float]:
    """Guideline: none."""
    return [1.0] * (len(completions) - 1)
'''
HANGS = '''
import time


def score(completion: str) -> float:
    """Guideline: none."""
    time.sleep(3600)
    return 1.0
'''


def one_stage(**changes: Any) -> dict[str, Any]:
    """A run of a single grpo stage on the base model, which ships nothing."""
    raw = copy.deepcopy(RUN)
    stage = raw["stages"]["grpo"] | {"model": "base", "steps": 2} | changes
    return {key: value for key, value in raw.items() if key not in ("gates", "release")} | {"stages": {"grpo": stage}}


@contextmanager
def unchanged(bench: Workbench) -> Iterator[None]:
    """Runs, assets, channels and blobs are afterwards what they were before."""

    def state() -> tuple[Any, ...]:
        with bench.open() as workspace:
            ledger = workspace.ledger
            rows = (ledger.runs(), ledger.assets(), ledger.channels())
        return (*rows, sorted(path for path in (bench.root / "blobs").rglob("*") if path.is_file()))

    before = state()
    yield
    assert state() == before


def refused(bench: Workbench, *command: str, code: int = 2, naming: tuple[str, ...]) -> str:
    """The command is refused with a line that names all of this, and leaves nothing."""
    with unchanged(bench):
        error = bench.run(*command, code=code).error
    for word in naming:
        assert word in error, f"{word!r} is not in {error!r}"
    return error


Change = Callable[[dict[str, Any]], None]


def put(path: str, value: Any) -> Change:
    """Set `a.b.c` in a run file."""

    def change(raw: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            raw = raw[parent]
        raw[last] = value

    return change


GATE = {"name": "ghost", "metric": "heldout/acuracy", "at_least": 0.5}


@pytest.mark.parametrize(
    ("change", "naming"),
    [
        pytest.param(put("stages.grpo.group_sice", 4), ("stages.grpo", "group_sice", "group_size"), id="unknown key"),
        pytest.param(put("bugdet", {}), ("bugdet", "budget"), id="unknown top-level key"),
        pytest.param(
            put("data.train", "dataset:trein"), ("data.train", "dataset:trein", "train"), id="missing data set"
        ),
        pytest.param(put("data.train", "nowhere.jsonl"), ("data.train", "nowhere.jsonl"), id="missing file"),
        pytest.param(
            put("data.train", "empty.jsonl"),
            ("data.train", "empty.jsonl", "at least one row", "0"),
            id="empty data set",
        ),
        pytest.param(put("model", "model:tiny@7"), ("model", "model:tiny@7", "1"), id="missing version"),
        pytest.param(
            put("gates", [GATE]),
            ("gates.ghost.metric", "heldout/acuracy", "heldout/accuracy"),
            id="metric nobody makes",
        ),
        pytest.param(put("stages.grpo.group_size", 1), ("stages.grpo", "group_size", "2", "1"), id="out of range"),
        pytest.param(put("release.channel", "Prod!"), ("release.channel", "Prod!"), id="no name for a channel"),
        pytest.param(put("stages.grpo.reward", "lenght"), ("stages.grpo", "lenght", "length"), id="unknown reward"),
    ],
)
def test_a_run_file_that_cannot_run(change: Change, naming: tuple[str, ...], empty: Workbench) -> None:
    raw = copy.deepcopy(RUN)
    change(raw)
    empty.write("bad.yaml", raw)
    empty.write("empty.jsonl", "\n")
    refused(empty, "run", "bad.yaml", naming=("bad.yaml", *naming))


@pytest.mark.parametrize(
    ("command", "naming"),
    [
        (("rollback", "prodd"), ("channel", "prodd", "no channel exists yet")),
        (("lineage", "prodd"), ("prodd", "posttrain ls")),
        (("asset", "add", "dataset:empty", "empty.jsonl"), ("empty.jsonl", "at least one row", "0")),
        (("asset", "add", "dataset:broken", "broken.jsonl"), ("broken.jsonl:2", "JSON")),
        (("asset", "add", "reward:none", "none.py"), ("none.py", "function")),
        (("run", "absent.yaml"), ("absent.yaml", "cannot be read")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_command_that_cannot_run(command: tuple[str, ...], naming: tuple[str, ...], empty: Workbench) -> None:
    empty.write("empty.jsonl", "")
    empty.write("broken.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    empty.write("none.py", "VALUE = 1\n")
    refused(empty, *command, naming=naming)


@pytest.mark.parametrize(
    ("source", "naming"),
    [
        pytest.param(RAISES, ("bad.py:4", "ZeroDivisionError"), id="raises"),
        pytest.param(NAN, ("bad.py:2", "finite", "nan"), id="NaN"),
        pytest.param(TOO_FEW, ("bad.py:2", "one score per completion (4)", "got 3"), id="wrong length"),
        pytest.param(HANGS, ("bad.py", "timeout of 0.5 s", "reward_timeout"), id="hangs"),
    ],
)
def test_a_reward_that_fails(source: str, naming: tuple[str, ...], empty: Workbench) -> None:
    empty.write("bad.py", source)
    patience = {"reward_timeout": 0.5} if source == HANGS else {}  # no other is to be cut off, however busy the machine
    empty.write("bad.yaml", one_stage(**patience) | {"rewards": {"length": "bad.py"}})
    job_fails(empty, naming)


def test_audit_37_a_reward_that_declines_every_response(empty: Workbench) -> None:
    empty.write("bad.py", 'def score(completion):\n    """Guideline: none."""\n    return None\n')
    empty.write("bad.yaml", one_stage() | {"rewards": {"length": "bad.py"}})
    job_fails(empty, ("path:bad.py gave no number to any of the 16 responses of this step", "returns None"))


def test_a_prompt_longer_than_the_context(empty: Workbench) -> None:
    row = '{"prompt": "Q: sort %s", "answer": "1"}\n'
    empty.write("long.jsonl", row % "12" + row % ("1" * 90))
    empty.write("bad.yaml", one_stage() | {"data": {"train": "long.jsonl"}})
    for verb in ("plan", "lock", "run"):
        refused(
            empty, verb, "bad.yaml", naming=("bad.yaml", "stages.grpo.data", "long.jsonl", "row 2", "context of 96")
        )


def test_a_corrupt_data_set(empty: Workbench) -> None:
    with empty.open() as workspace:
        digest = workspace.catalog.find("dataset:train").digest
    flip_a_bit(empty, digest)
    shutil.rmtree(empty.root / "cache", ignore_errors=True)  # what was planned before would not be read again
    empty.write("bad.yaml", one_stage())
    refused(empty, "run", "bad.yaml", code=8, naming=(digest[:19],))


def test_corrupt_weights(empty: Workbench) -> None:
    with empty.open() as workspace:
        listing = tree_listing(workspace.blobs, workspace.catalog.find("model:tiny").digest)
    digest = listing["model.safetensors"].digest
    flip_a_bit(empty, digest)
    shutil.rmtree(empty.root / "cache", ignore_errors=True)
    empty.write("bad.yaml", one_stage())
    job_fails(empty, (digest[:19],), code=8)


def flip_a_bit(bench: Workbench, digest: str) -> None:
    name = digest.removeprefix("sha256:")
    blob = bench.root / "blobs" / "sha256" / name[:2] / name[2:]
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)


def job_fails(bench: Workbench, naming: tuple[str, ...], code: int = 2) -> None:
    """What only the job can see: it fails once, is not tried again, and makes nothing."""
    error = bench.run("run", "bad.yaml", code=code).error
    for word in naming:
        assert word in error, f"{word!r} is not in {error!r}"
    run_id = bench.run_id()
    bench.check(run_id, "failed")
    assert [attempt.state for attempt in bench.attempts(run_id)] == ["failed"]
    assert bench.outputs(run_id) == {}
    with bench.open() as workspace:
        assert workspace.ledger.channels() == []


def test_data_that_changed_after_the_lock(empty: Workbench) -> None:
    empty.write("mine.jsonl", '{"prompt": "Q: sort 21", "answer": "12"}\n')
    empty.write("mine.yaml", one_stage() | {"data": {"train": "mine.jsonl"}})
    empty.run("lock", "mine.yaml")
    with (empty.folder / "mine.jsonl").open("a") as file:
        file.write('{"prompt": "Q: sort 31", "answer": "13"}\n')
    refused(empty, "run", "mine.lock.json", naming=("mine.lock.json", "sha256:"))


def test_a_workspace_of_a_newer_schema(empty: Workbench) -> None:
    with closing(sqlite3.connect(empty.root / "ledger.db")) as database, database:
        database.execute("UPDATE schema_version SET version_num = '9999', usable_since = '9999'")
    for command in (("run", "run.yaml"), ("ls",)):
        error = empty.run(*command, code=10).error
        assert "9999" in error
        assert "upgrade posttrain" in error


def test_no_workspace(empty: Workbench) -> None:
    shutil.rmtree(empty.root)
    assert "posttrain init" in empty.run("run", "run.yaml", code=10).error
    assert not empty.root.exists()


def test_a_read_only_workspace(empty: Workbench) -> None:
    here = shlex.quote(str(empty.folder))
    ended = in_namespace(
        empty, f"mount --bind {here} {here} && mount -o remount,ro,bind {here} && cd {here}", "run", "run.yaml"
    )
    assert ended.code == 10, ended
    assert str(empty.root) in ended.error
    assert "writable" in ended.error
    with empty.open() as workspace:
        assert [run.name for run in workspace.ledger.runs()] == ["model-tiny"]


def test_a_full_disk(empty: Workbench) -> None:
    here = shlex.quote(str(empty.folder))
    empty.write("big.jsonl", '{"prompt": "Q: sort 21", "answer": "12"}\n' * 100_000)
    fill = f"mount -t tmpfs -o size=3m tmpfs {here}/disk && cp -a {here}/.posttrain {here}/disk/ && cd {here}/disk"
    (empty.folder / "disk").mkdir()
    ended = in_namespace(empty, fill, "asset", "add", "dataset:big", "../big.jsonl", after="asset ls -o json")
    assert ended.code == 10, ended
    *progress, last = ended.err.splitlines()  # a slow machine shows how far it is
    assert last.startswith("error: ")
    assert "the disk is full" in last
    assert all(line.endswith(" rows") for line in progress)
    assert '"dataset:train@1"' in ended.out
    assert "dataset:big" not in ended.out


def test_files_that_may_not_grow(empty: Workbench) -> None:
    """A full disk where nothing can be mounted: the ledger itself cannot be written."""
    posttrain = f"{shlex.quote(sys.executable)} -P -m posttrain run run.yaml"
    limited = ["sh", "-c", f"ulimit -f 8; exec {posttrain}"]  # blocks of 512 bytes
    with unchanged(empty):
        done = subprocess.run(limited, cwd=empty.folder, capture_output=True, text=True, check=False)
        ended = Finished(done.returncode, done.stdout, done.stderr)
        assert ended.code == 10, ended
        assert "ledger.db" in ended.error or "the disk is full" in ended.error


def in_namespace(bench: Workbench, mounts: str, *arguments: str, after: str = "") -> Finished:
    """Run a command with mounts of its own; nobody else sees them, and they end with it."""
    posttrain = f"{shlex.quote(sys.executable)} -P -m posttrain"
    script = f"{mounts} || exit 99; {posttrain} {shlex.join(arguments)}; code=$?"
    script += f"; {posttrain} {after}; exit $code" if after else "; exit $code"
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--", "sh", "-c", script],
            cwd=bench.folder,
            env={key: value for key, value in os.environ.items() if not key.startswith("POSTTRAIN_")},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("this machine has no unshare(1)")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")
    return Finished(done.returncode, done.stdout, done.stderr)
