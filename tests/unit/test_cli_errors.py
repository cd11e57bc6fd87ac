"""Bad input at the command line: one line on stderr that names the trouble, the documented exit code, no traces."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import RUN, World, make_world

import posttrain.__main__
from posttrain.cli.main import app


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One workspace for all: nothing here may change it."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("errors"), patch)
        made.prepare()
        yield made


def one_line(result: object) -> str:
    """The error line, which is all of stderr."""
    text = str(result.stderr).strip()  # type: ignore[attr-defined]
    assert text.startswith("error: ")
    assert "\n" not in text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("release: {", "relaese: {"), ("relaese", "release")),
        (("seed: 17", "seed: -1"), ("seed", "-1")),
        (("dataset:train,", "dataset:trane,"), ("dataset:trane", "train")),
        (("dataset:train,", "dataset:train@7,"), ("dataset:train@7", "7")),
        (("reward:sort", "reward:nope"), ("reward:nope", "sort")),
        (("model: model:tiny", "model: ./nowhere"), ("./nowhere",)),
        (("steps: 4", "steps: 0"), ("stages.sft", "steps", "0")),
        (("kind: sft", "kind: sfd"), ("sfd", "sft")),
        (("metric: heldout/accuracy, at_least", "metric: heldout/acuracy, at_least"), ("heldout/acuracy",)),
        (("at_least: 0.9", "at_least: .nan"), ("at_least",)),
        (("model: grpo}\n", "model: gpro}\n"), ("gpro", "grpo")),
        (("name: sort", "name: sort\nname: sort"), ("name", "twice")),
    ],
)
def test_a_wrong_run_file_names_file_and_place(world: World, change: tuple[str, str], words: tuple[str, ...]) -> None:
    assert change[0] in RUN
    world.write("wrong.yaml", RUN.replace(*change))
    for verb in ("plan", "lock", "run"):
        result = world(verb, "wrong.yaml")
        assert result.exit_code == 2, result.stdout
        line = one_line(result)
        assert "wrong.yaml" in line
        for word in words:
            assert word in line
    assert not (world.root / "wrong.lock.json").exists()
    assert world.json("ls")["runs"] == []


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("plan none.yaml", 2, ("none.yaml", "cannot be read")),
        ("plan run.yaml --seed -3", 2, ("seed", "-3")),
        ("run gone.lock.json", 2, ("gone.lock.json",)),
        ("get nobody", 2, ("nobody", "posttrain ls")),
        ("why nobody", 2, ("nobody",)),
        ("logs nobody", 2, ("nobody",)),
        ("retry nobody", 2, ("nobody",)),
        ("stop nobody", 2, ("nobody",)),
        ("rollback staging", 2, ("staging", "unknown")),
        ("lineage staging", 2, ("staging",)),
        ("verify staging", 2, ("staging",)),
        ("asset get dataset:train@9", 2, ("dataset:train@9", "latest is 1")),
        ("asset get datset:train", 2, ("datset", "dataset")),
        ("asset add datset:x run.yaml", 2, ("datset", "dataset")),
        ("asset add dataset:x@3 train.jsonl", 2, ("@3",)),
        ("asset add dataset:Bad/Name train.jsonl", 2, ("Bad/Name",)),
        ("asset add dataset:x none.jsonl", 2, ("none.jsonl",)),
        ("asset add dataset:x train.jsonl --entry f", 2, ("--entry",)),
        ("asset add reward:x reward.py --entry nope", 2, ("nope", "score")),
        ("asset add model:x .", 2, ("config.json",)),
        ("asset ls modle", 2, ("modle", "model")),
        ("asset create dataset:x run.yaml", 2, ("dataset:x", "model:NAME")),
        ("asset create model:x run.yaml", 2, ("run.yaml",)),
        ("demo --task no-such-task", 2, ("no-such-task",)),
        ("logs nobody -f -o json", 2, ("-f",)),
        ("lock run.yaml --out late.json", 2, ("late.json", "*.lock.json", "--out")),
        ("plan late.lock.json", 2, ("is a locked manifest", "posttrain run late.lock.json")),
        ("lock late.lock.json", 2, ("is a locked manifest", "posttrain run late.lock.json")),
        ("run run.yaml --timeout -5", 2, ("--timeout", "more than 0", "-5")),
        ("run run.yaml --timeout nan", 2, ("--timeout", "nan")),
        ("retry nobody --timeout 0", 2, ("--timeout", "got 0")),
        ("get nobody --watch --timeout -1", 2, ("--timeout", "-1")),
        ("logs nobody -f --timeout -1", 2, ("--timeout", "-1")),
    ],
)
def test_a_wrong_word_names_itself(world: World, command: str, code: int, words: tuple[str, ...]) -> None:
    result = world(*command.split())
    assert result.exit_code == code, result.stdout
    for word in words:
        assert word in one_line(result)
    assert not (world.root / "late.json").exists()
    assert world.json("ls")["runs"] == []


def test_an_empty_or_broken_data_set_is_refused(world: World) -> None:
    world.write("empty.jsonl", "")
    assert "empty.jsonl" in one_line(world("asset", "add", "dataset:empty", "empty.jsonl"))
    world.write("broken.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    assert "broken.jsonl:2" in one_line(world("asset", "add", "dataset:broken", "broken.jsonl"))
    assert [asset["ref"] for asset in world.json("asset", "ls", "dataset")] == ["dataset:heldout@1", "dataset:train@1"]


def test_a_lock_of_other_sources_is_refused(world: World) -> None:
    world.ok("lock", "run.yaml", "--out", "other.lock.json")
    manifest = json.loads((world.root / "other.lock.json").read_text())
    manifest["code"]["native"] = "sha256:" + "0" * 64
    world.write("other.lock.json", json.dumps(manifest))
    assert "differ from those in the lock" in one_line(world("run", "other.lock.json"))
    manifest["surprise"] = 1
    world.write("other.lock.json", json.dumps(manifest))
    assert "surprise" in one_line(world("run", "other.lock.json"))
    world.write("other.lock.json", "[]")
    assert "other.lock.json" in one_line(world("run", "other.lock.json"))
    assert "--seed" in one_line(world("run", "other.lock.json", "--seed", "1"))


@pytest.mark.parametrize(("value", "words"), [("five", ("steps", "five")), (0, ("steps", "0"))])
def test_a_lock_with_a_parameter_that_its_trainer_refuses(world: World, value: object, words: tuple[str, ...]) -> None:
    world.ok("lock", "run.yaml", "--out", "edited.lock.json")
    manifest = json.loads((world.root / "edited.lock.json").read_text())
    next(stage for stage in manifest["stages"] if stage["name"] == "grpo")["params"]["steps"] = value
    world.write("edited.lock.json", json.dumps(manifest))
    result = world("run", "edited.lock.json")
    assert result.exit_code == 2
    assert one_line(result).startswith("error: edited.lock.json: stages.grpo: ")
    for word in words:
        assert word in one_line(result)
    assert world.json("ls")["runs"] == []


def test_without_a_workspace_every_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    for command in ("ls", "asset ls", "get x", "verify prod", "run run.yaml"):
        result = world(*command.split())
        assert result.exit_code == 10
        assert "posttrain init" in one_line(result)


def test_a_bug_is_one_line_and_a_traceback_in_a_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("wires\ncrossed")

    monkeypatch.setattr("posttrain.app.workspace.find_workspace", explode)
    result = world("ls")
    assert result.exit_code == 1
    line = one_line(result)
    assert "RuntimeError: wires crossed" in line
    path = Path(line.rpartition(" with ")[2])
    assert "Traceback" in path.read_text()
    path.unlink()


def test_usage_errors_are_exit_2(world: World) -> None:
    for words in (("frobnicate",), ("get",), ("ls", "--colour"), ("ls", "-o", "xml")):
        result = world(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")


def test_json_knows_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain.cli.console import emit_json

    emit_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, None)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [1, None]}


HEAVY = ("torch", "transformers", "sqlalchemy", "pyarrow", "scipy", "numpy", "matplotlib", "pydantic", "rich", "yaml")
PROGRAM = """
import sys
import posttrain.__main__
from posttrain.cli.main import app
try:
    app({words!r}, prog_name="posttrain")
except SystemExit as end:
    code = end.code
print(code, *sorted(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "heavy", "loaded"),
    [
        (["--help"], HEAVY, "0"),
        (["asset", "add", "--help"], ("torch", "sqlalchemy", "pyarrow", "numpy", "rich"), "0"),
        (["init"], ("torch", "transformers", "matplotlib"), "0"),
        (["doctor"], ("torch", "transformers", "matplotlib"), "0"),
    ],
)
def test_what_a_command_does_not_import(tmp_path: Path, words: list[str], heavy: tuple[str, ...], loaded: str) -> None:
    program = PROGRAM.format(words=words, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stderr.strip().splitlines()[-1] == loaded


@pytest.mark.slow
def test_looking_needs_no_numbers(world: World) -> None:
    """`ls` loads no library of numbers, nor the reconciler."""
    heavy = ("numpy", "pyarrow", "torch", "posttrain.control.reconciler")
    program = PROGRAM.format(words=["ls"], heavy=heavy)
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=world.root, capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "0"


def test_output_into_a_pipe_has_no_escapes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for words in (("plan", "run.yaml"), ("asset", "ls"), ("ls",), ("doctor",)):
        assert "\x1b" not in world(*words).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("plan", "run.yaml"), *(pytest.param(one, marks=pytest.mark.slow) for one in (("ls",), ("ls", "-o", "json")))],
)
def test_a_reader_that_has_gone_is_no_bug(world: World, words: tuple[str, ...]) -> None:
    """`posttrain ls | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "posttrain", *words]
        done = subprocess.run(command, cwd=world.root, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_an_ascii_pipe_is_no_reason_to_fail(world: World) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "posttrain", "plan", "run.yaml"]
    done = subprocess.run(command, cwd=world.root, capture_output=True, text=True, check=True, env=environment)
    assert "stage sft" in done.stdout


def test_the_app_object_is_what_main_runs() -> None:
    assert app.info.name == "posttrain"


class _Interrupts:
    """Ctrl-C while the commands are loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "posttrain.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_while_it_loads_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "posttrain.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        posttrain.__main__.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_audit_2_a_project_is_checked_before_a_workspace_is_opened(world: World) -> None:
    """A slip would open a project that no list shows."""
    data = world.write("few.jsonl", '{"prompt": "q", "completion": "a"}\n')
    for name, words in (
        ("../x", "must be 1 to 63 characters from a-z 0-9 -"),
        ("typo", "there is no project 'typo', only "),
    ):
        result = world("--project", name, "asset", "add", "dataset:few", data)
        assert (result.exit_code, words in one_line(result)) == (2, True), result.stderr
    with sqlite3.connect(world.root / ".posttrain" / "ledger.db") as ledger:
        assert ledger.execute("SELECT DISTINCT project FROM events").fetchall() == [("default",)]
