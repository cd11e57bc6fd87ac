"""Runs that wait for a pretended device until a test lets go of it: nothing computes meanwhile; a stage is a copy."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import sysconfig
import threading
import venv
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench import PATIENCE, Workbench

import posttrain
from posttrain.execution.executors.local.devices import FOLDER_VARIABLE, Devices, Taken, take

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from installed import install

_POINTS = "[posttrain.trainers]\nheld = posttrain_held:Held\n"
_SOURCE = '''
import os
import shutil
import time
from pathlib import Path

from posttrain.domain.kinds import StageContract
from posttrain.domain.jobs import JobResult, JobCommand, Output


class Held:
    """Takes stages of kind sft; needs a device, and learns nothing."""

    name = "held"

    def code_digest(self):
        return "1"

    def check(self, kind, params):
        given = {"model": "model", "mark": params.get("mark", 0)}
        return StageContract(given, {"model": ("model", str(params["model"]))}, {"model": "tree"})

    def devices(self, kind, params):
        return 1

    def compile(self, order):
        return JobCommand("posttrain_held", devices=1)

    def collect(self, attempt):
        return attempt.read_result()


def body(job):
    while not Path(os.environ.get("HELD_UNTIL", "/")).exists():
        time.sleep(0.01)
    shutil.copytree(job.input("model"), job.folder / "outputs" / "model")
    return JobResult("succeeded", {"model": Output("outputs/model", "tree")})


if __name__ == "__main__":
    from posttrain.jobs.entry import main

    main(body)
'''
RUN: dict[str, Any] = {
    "name": "held",
    "owner": "e2e",
    "seed": 1,
    "model": "model:tiny",
    "stages": {
        "first": {"kind": "sft", "trainer": "held", "model": "base", "mark": 1},
        "second": {"kind": "sft", "trainer": "held", "model": "first", "mark": 2},
    },
}


def python(folder: Path) -> Path:
    """An interpreter that has the trainer, and everything else from this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    source = Path(posttrain.__file__).parents[1]
    (packages / "those_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{source}\n")
    install(packages, "posttrain-held", "1.0", _POINTS, {"posttrain_held.py": _SOURCE})
    return folder / "bin" / "python"


def write_model(folder: Path) -> None:
    """A folder in Hugging Face format whose only weight is a number."""
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 60}
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))


def make(bench: Workbench) -> dict[str, Any]:
    """A workspace with a model and a run file, and beside it the interpreter."""
    python(bench.folder.with_suffix(".python"))
    prepared(bench, bench.folder)
    write_model(bench.folder / "base")
    write_run(bench, "held")
    bench.run("init")
    bench.run("asset", "add", "model:tiny", "base")
    return {}


def prepared(bench: Workbench, origin: Path) -> Workbench:
    """A workspace that was made, or a copy of it, with the interpreter and a device of its own."""
    locks = bench.folder / "locks"
    locks.mkdir(exist_ok=True)
    bench.python = str(origin.with_suffix(".python") / "bin" / "python")
    bench.environment = {"POSTTRAIN_DEVICES": "1", FOLDER_VARIABLE: str(locks)}
    return bench


def write_run(bench: Workbench, name: str) -> str:
    """Another run file; its name."""
    bench.write(f"{name}.yaml", {**RUN, "name": name})
    return f"{name}.yaml"


def held_devices(bench: Workbench) -> Taken:
    """Take the devices of the workspace's jobs: no stage starts until this is closed."""
    machine = Devices(("0",), folder=bench.environment[FOLDER_VARIABLE])
    taken = take(machine, 1)
    assert taken is not None
    return taken


_ON_IT = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A command on a terminal of its own, of which this is keyboard and screen.

    Args:
        stdin: what the command reads instead of the keyboard.
    """

    def __init__(self, bench: Workbench, *arguments: str, stdin: int | None = None) -> None:
        self._master, slave = os.openpty()
        self._told, self._tell = os.pipe()
        words = [bench.python, "-P", "-m", "posttrain", *arguments]
        self.process = subprocess.Popen(
            ["env", "--default-signal=INT,HUP", sys.executable, "-c", _ON_IT, *words],
            cwd=bench.folder, env=bench.variables(), stdout=slave, stderr=slave,
            stdin=slave if stdin is None else stdin, start_new_session=True, text=True,
        )  # fmt: skip
        os.close(slave)
        bench.started.append(self.process)
        self._shown: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        """What was written on it."""
        return b"".join(self._shown).decode(errors="replace")

    def press(self, key: bytes) -> None:
        """Type a key: b"\x03" is Ctrl-C."""
        os.write(self._master, key)

    def hang_up(self) -> None:
        """Close it, as a window is closed: the kernel tells the command."""
        os.close(self._tell)
        self._reader.join(PATIENCE)
        os.close(self._master)

    def finish(self) -> int:
        """Wait for the command; its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        with suppress(OSError):  # on Linux the end of a terminal is an error
            while self._told not in select.select([self._master, self._told], [], [])[0]:
                self._shown.append(os.read(self._master, 4096))
