"""Programs that answer somebody who waits: their answers, their errors, their end."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.domain.errors import DeadlineError, InfrastructureError, InputError, IntegrityError
from posttrain.execution.foreground import answers
from posttrain.jobs.bodies.cast import cast

ANSWERS = """
import json, sys, time, os
asked = json.load(sys.stdin)
print(json.dumps({"got": asked, "pid": os.getpid()}), flush=True)
"""
PATIENCE = 300.0


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A program of these lines after it has read its question and answered once; its module's name."""
    finder = tmp_path / "python"
    finder.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$1" "$3" "$4"\n')
    finder.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(finder))

    def make(lines: str = "") -> str:
        name = f"told_{abs(hash(lines))}"  # of its own: compiled files tell sources by second and size
        (tmp_path / f"{name}.py").write_text(ANSWERS + lines)
        return name

    return make


def test_what_is_asked_arrives_and_answers_come_one_by_one(program: Callable[[str], str]) -> None:
    said = list(answers(program("print(json.dumps({'more': 1}))"), {"a": "ü"}, timeout=PATIENCE))
    assert said[0]["got"] == {"a": "ü", "asked_by": os.getpid()}
    assert said[1] == {"more": 1}


def test_no_key_reaches_it(program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "HF_TOKEN", "POSTTRAIN_TOKEN")
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "OTHER_WORD", *keys):
        monkeypatch.setenv(name, "secret")
    said = list(answers(program("print(json.dumps({'names': sorted(os.environ)}))"), {}, timeout=PATIENCE))
    assert "OTHER_WORD" in said[1]["names"]
    assert not [name for name in said[1]["names"] if name.startswith(("WANDB_", "MLFLOW_")) or name in keys]


def test_an_error_is_the_one_that_the_program_names(program: Callable[[str], str]) -> None:
    for code, kind in ((2, InputError), (8, IntegrityError)):
        name = program(f"print(json.dumps({{'error': 'no such thing', 'exit_code': {code}}}))")
        with pytest.raises(kind, match=r"^no such thing$"):
            list(answers(name, {}, timeout=PATIENCE))


def test_a_program_that_dies_is_told_with_its_last_words(program: Callable[[str], str]) -> None:
    name = program("sys.exit('the disk is gone')")
    with pytest.raises(InfrastructureError, match=r"exit code 1: the disk is gone"):
        list(answers(name, {}, timeout=PATIENCE))


def test_who_asked_may_end_at_any_moment_and_is_not_kept_by_the_deadline(program: Callable[[str], str]) -> None:
    name = program("while os.getppid() == asked['asked_by']: time.sleep(0.1)")
    asker = (
        "import sys; from posttrain.execution.foreground import answers; "
        f"sys.executable = {sys.executable!r}; told = answers({name!r}, {{}}, timeout=100000); next(told); sys.exit(3)"
    )  # what it was told is a global: nothing closes it before the interpreter waits for threads
    ended = subprocess.run([f"{sys.prefix}/bin/python", "-c", asker], timeout=PATIENCE, check=False)
    assert ended.returncode == 3


def test_one_that_does_not_end_is_ended_at_its_deadline(program: Callable[[str], str]) -> None:
    name = program("import subprocess; subprocess.run(['sleep', '100000'])")
    with pytest.raises(DeadlineError, match="gave no answer within"):
        for _ in answers(name, {}, timeout=1.0):
            pass


def test_it_goes_with_whoever_no_longer_listens(program: Callable[[str], str]) -> None:
    said = answers(program("time.sleep(100000)"), {}, timeout=PATIENCE)
    pid = next(said)["pid"]
    said.close()  # type: ignore[attr-defined]
    assert not psutil.pid_exists(pid)


SERVED = """
import os
from posttrain.jobs.entry import serve

def program(asked):
    os.write(1, b"a library's own words")
    print("more of them", flush=True)
    yield {"pid": os.getpid()}
    import time
    while asked.get("stay"):
        time.sleep(0.02)

serve(program)
"""
ASKING = """
import sys
sys.executable = sys.argv[1]
from posttrain.execution.foreground import answers
for answer in answers("served", {"stay": True}, timeout=100000):
    print(answer["pid"], flush=True)
"""


class TestServe:
    """The other side: a program of this package."""

    @pytest.fixture
    def served(self, program: Callable[[str], str], tmp_path: Path) -> str:
        (tmp_path / "served.py").write_text(SERVED)
        return "served"

    def test_what_libraries_print_is_no_answer(self, served: str) -> None:
        (answer,) = answers(served, {}, timeout=PATIENCE)
        assert answer.keys() == {"pid"}

    def test_it_dies_with_whoever_asked_however_that_ends(self, served: str, tmp_path: Path) -> None:
        python = shutil.which("python3", path=str(Path(sys.prefix) / "bin")) or ""
        asking = subprocess.Popen([python, "-c", ASKING, sys.executable], stdout=subprocess.PIPE, text=True)
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        assert psutil.pid_exists(pid)
        asking.kill()
        asking.wait()
        deadline = time.monotonic() + PATIENCE
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        asking.stdout.close()


class TestCast:
    """The weights of a folder in another type."""

    def folder(self, path: Path, **tensors: torch.Tensor) -> Path:
        path.mkdir()
        config = {"architectures": ["X"], "dtype": "float32", "text_config": {"torch_dtype": "float32"}}
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        return path

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_each_weight_is_rounded_once_and_integers_stay(self, tmp_path: Path, dtype: str) -> None:
        weights, counts = torch.randn(17, 5, generator=torch.Generator().manual_seed(1)), torch.arange(3)
        folder = self.folder(tmp_path / "m", weights=weights, counts=counts)
        told = {"file": "model.safetensors", "tensors": 2, "dtype": dtype}
        assert list(cast({"folder": str(folder), "dtype": dtype})) == [told]
        found = load_file(folder / "model.safetensors")
        assert torch.equal(found["weights"], weights.to(getattr(torch, dtype)))
        assert torch.equal(found["counts"], counts)
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == config["text_config"]["torch_dtype"] == dtype

    def test_a_weight_that_does_not_fit_is_refused_and_the_file_stays(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "m", wide=torch.tensor([1.0, 70000.0]))
        before = (folder / "model.safetensors").read_bytes()
        with pytest.raises(InputError, match=r"wide: its largest weight, 7e\+04, is outside the range of float16"):
            list(cast({"folder": str(folder), "dtype": "float16"}))
        assert (folder / "model.safetensors").read_bytes() == before

    def test_quantised_weights_are_refused(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "m", small=torch.ones(2).to(torch.float8_e4m3fn))
        with pytest.raises(InputError, match=r"small: is quantised \(torch.float8_e4m3fn\)"):
            list(cast({"folder": str(folder), "dtype": "bfloat16"}))

    def test_what_was_no_number_before_may_stay_none(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "m", odd=torch.tensor([math.inf, math.nan, 1.0]))
        list(cast({"folder": str(folder), "dtype": "float16"}))
        assert load_file(folder / "model.safetensors")["odd"][2] == 1.0

    def test_every_shard_and_the_size_in_the_index(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "m", a=torch.ones(4))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        save_file({"b": torch.ones(6)}, folder / "model-00002-of-00002.safetensors")
        index = {"metadata": {"total_size": 40}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        list(cast({"folder": str(folder), "dtype": "bfloat16"}))
        assert json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 20
