"""The reward function in its own process: started once per job, killed when it passes its deadline."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import posttrain.engine.rewards.worker as worker
from posttrain.domain.errors import InputError
from posttrain.domain.rewards import source_name
from posttrain.engine.rewards.port import RewardCall, RewardError, Score, checked

LIMITS: Mapping[str, int] = {
    "RLIMIT_AS": 8 * 2**30,  # bytes of address space: numpy and friends reserve much and use little
    "RLIMIT_FSIZE": 2**30,  # bytes per file written, the job's log included
    "RLIMIT_NOFILE": 256,
}
END_TIMEOUT = 5.0  # seconds the keeper may take to kill what the reward started, before it is killed itself
_SOURCES = Path(__file__).resolve().parents[3]
START_TIMEOUT = 30.0  # seconds a worker may take to start and import the reward's source, on a busy machine


class ProcessReward:
    """A reward function in a worker process; see `open_reward`."""

    def __init__(
        self,
        path: Path,
        entry: str | None,
        timeout: float,
        dialect: str,
        name: str,
        source: str = "",
        hidden: Sequence[Path] = (),
    ) -> None:
        self._timeout = timeout
        self._name = name or f"reward {source or path.name}"
        self._scratch = tempfile.mkdtemp(prefix="posttrain-reward-")
        folders, exposed = _hideable(hidden, Path(self._scratch))
        self._process, self._channel = _start(self._scratch, folders)
        try:
            path = _within_reach(path, source, Path(self._scratch), folders)
            wanted = None if dialect == "auto" else dialect
            order = {"op": "open", "path": str(path), "entry": entry, "dialect": wanted}
            opened = self._ask(order, max(timeout, START_TIMEOUT), "load")
        except BaseException:
            self.close()
            raise
        self.where: str = opened["where"]
        self.dialect: str = opened["dialect"]
        self._notes = (*opened["notes"], *exposed)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be confined, in words."""
        return self._notes

    def score(self, call: RewardCall) -> list[Score]:
        """Score one batch within the time-out.

        Raises:
            RewardError: it raised, answered with something else than one finite number or None per completion, died, or
                passed the time-out (it is killed then).
        """
        if not len(call):
            return []
        message = {"op": "score", **{field.name: getattr(call, field.name) for field in fields(call)}}
        answer = self._ask(message, self._timeout, f"score {len(call)} completions")
        return checked([(score, components) for score, components in answer["scores"]], call, self.where)

    def close(self) -> None:
        """Kill the worker and everything it started, detached or not; remove its scratch folder."""
        self._channel.close()
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: Mapping[str, Any], timeout: float, task: str) -> Any:
        if self._channel.fileno() < 0:
            raise InputError(f"{self._name} is closed; open it again to score")
        channel = _Deadline(self._channel, time.monotonic() + timeout)
        try:
            worker.send(channel, message)
            answer = worker.receive(channel)
        except TimeoutError:
            self.close()
            raise RewardError(
                f"{self._name} took longer than its time-out of {timeout:g} s to {task} and was killed; "
                "make it faster or raise reward_timeout"
            ) from None
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # let it finish exiting, to tell its own exit code from our kill
            self.close()
            raise RewardError(f"{self._name} ended its process ({self._ending()}) instead of answering") from None
        except (ValueError, TypeError) as error:
            self.close()
            raise RewardError(f"{self._name} was given or answered what is not JSON: {error}") from None
        if "error" in answer:
            kind, text = answer["error"]["kind"], answer["error"]["message"]
            raise (InputError if kind == "load" else RewardError)(f"{self._name}: {text}")
        return answer

    def _ending(self) -> str:
        code = self._process.returncode or 0
        signalled = -code if code < 0 else code - 128  # the keeper answers as shells do
        return f"signal {signalled}" if signalled > 0 else f"exit code {code}"


class _Deadline:
    """A socket whose operations all end at one moment."""

    def __init__(self, channel: socket.socket, moment: float) -> None:
        self._channel = channel
        self._moment = moment

    def sendall(self, data: bytes, /) -> None:
        """As `socket.sendall`."""
        self._arm()
        self._channel.sendall(data)

    def recv(self, count: int, /) -> bytes:
        """As `socket.recv`."""
        self._arm()
        return self._channel.recv(count)

    def _arm(self) -> None:
        left = self._moment - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)


def open_reward(
    path: Path,
    entry: str | None = None,
    *,
    timeout: float,
    dialect: str | None = "auto",
    name: str = "",
    source: str = "",
    hidden: Sequence[Path] = (),
) -> ProcessReward:
    """Start a worker for one reward function; close it when the job ends.

    The function may be written in any dialect of `engine.rewards.dialects`. It runs with a minimal environment, a
    scratch folder as home and resource limits, in a cell without network and without sight of other processes or of
    `hidden` folders where the kernel allows (`notes` says when not). All other files are as open to it as to the user
    who runs the job. It ends, with everything it started, when it is closed, when it passes its time-out, and when the
    thread that opened it ends. It must give the same scores for the same call; Python's and numpy's global generators
    are seeded from the call for that.

    Args:
        path: the source file, or a folder that holds it.
        entry: `function`, `file.py:function` or `file.py:`; without a function name it is `score`, `compute_score` or
        the
            only public function; without a file name a folder must hold `reward.py` or one Python file.
        timeout: seconds one batch may take.
        dialect: one of `DIALECTS` when the parameter names do not tell; `auto` reads them.
        name: how errors call it, e.g. `reward:exact@1`.
        source: the file's original name for error messages, when `path` is a blob called by its digest.
        hidden: folders the reward finds empty, such as the workspace; its own source may lie in one.

    Raises:
        InputError: no such file or function, not Python, parameters of no dialect, or an unknown dialect.
        RewardError: its code raises or hangs while it is imported.
    """
    file, _, function = (entry or "").rpartition(":")
    return ProcessReward(source_file(path, file), function or None, timeout, dialect or "auto", name, source, hidden)


def source_file(path: Path, file: str = "") -> Path:
    """The reward's source: `path` itself, or the named / `reward.py` / only Python file of the folder `path`.

    Raises:
        InputError: there is no such file, or the folder holds several and none is called `reward.py`.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"reward source {path.name} does not exist; give a Python file or a folder that holds one")
    return path / source_name({p.name for p in path.glob("*.py")}, file, path.name)


def _within_reach(path: Path, source: str, scratch: Path, hidden: Sequence[Path]) -> Path:
    """The source under its own name, which errors show, where the reward can read it."""
    if path.suffix != ".py":  # a blob
        return Path(shutil.copyfile(path, scratch / Path(source or "reward.py").name))
    if any(path.resolve().is_relative_to(folder) for folder in hidden):
        return shutil.copytree(path.parent, scratch / "source") / path.name  # with its sibling modules
    return path


def _hideable(hidden: Sequence[Path], scratch: Path) -> tuple[list[Path], list[str]]:
    """The outermost of the folders, but for those without which the reward could not run; notes on these."""
    needed = [path.resolve() for path in (scratch, _SOURCES, *map(Path, (sys.prefix, sys.base_prefix, sys.executable)))]
    wanted = {folder.resolve() for folder in hidden if folder.is_dir()}
    holding = {folder for folder in wanted if any(path.is_relative_to(folder) for path in needed)}
    kept = sorted(folder for folder in wanted - holding if not any(p in wanted - holding for p in folder.parents))
    return kept, [f"the reward can read and write {folder}: it holds what the reward runs on" for folder in holding]


def _start(scratch: str, hidden: Sequence[Path]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a worker with a minimal environment: no variable of ours reaches the reward's code."""
    ours, theirs = socket.socketpair()
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(_SOURCES),
        "PYTHONHASHSEED": "0",  # iteration over sets of strings must not differ from run to run
        "PYTHONDONTWRITEBYTECODE": "1",  # the source may lie in the shared cache
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    cell = json.dumps({"limits": dict(LIMITS), "hidden": [str(folder) for folder in hidden]})
    command = [sys.executable, "-s", "-P", "-m", worker.__name__, str(theirs.fileno()), cell, str(os.getpid())]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=environment,
            cwd=scratch,
            start_new_session=True,
        )
    return process, ours
