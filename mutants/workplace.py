"""A copy of the repository with a separate environment, in which mutants are tested one after another.

The environment is a virtual one whose only added path is the copy's `src`, before all packages that are installed here.
Processes that tests start, even isolated ones, therefore import the mutant and not an installed Posttrain.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mutants.catalogue import ROOT, Mutant

MARK = "POSTTRAIN_MUTANT"  # variable in the environment of all processes of a trial
_PASSED, _FAILED, _INTERRUPTED, _INTERNAL = 0, 1, 2, 3  # exit codes of pytest; 4 and 5: the list is wrong


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one mutant: `killed`, `hung` (killed at the limit) or `survived`."""

    mutant: Mutant
    outcome: str
    seconds: float
    word: str = ""  # the first test that failed


class Workplace:
    """One copy. Use it as a context manager.

    Args:
        limit: maximum seconds of a mutant's tests; a hang counts as noticed.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._folder.chmod(0o755)  # tests act as other users, who must be able to read the files
        self._tree = self._folder / "tree"
        self._zygote: subprocess.Popen[str] | None = None
        self._fresh = True
        self._mark = ""  # of the trial that runs
        self._moment = 1_000_000_000  # modification time of the last changed source, by which bytecode is recompiled

    def __enter__(self) -> Workplace:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._tree / name, follow_symlinks=False)
        venv.create(self._folder / "venv", symlinks=True)
        at = self._folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        paths = [str(self._tree / "src"), *dict.fromkeys(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))]
        (at / "mutants.pth").write_text("\n".join(paths) + "\n")
        return self

    def __exit__(self, *failure: object) -> None:
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
        if self._mark:
            _end_all(self._mark)
        shutil.rmtree(self._folder, ignore_errors=True)

    def baseline(self, tests: Sequence[str]) -> str:
        """Run tests on the unmutated sources; return pytest's output, or an empty text if all pass."""
        code, said = self._pytest(tests, self._limit)
        ended = f"exit code {code}" if code is not None else f"no end within {self._limit:g} s"
        return "" if code == _PASSED else f"{' '.join(tests)}: {ended}: {said[-2000:]}"

    def trial(self, mutant: Mutant) -> Trial:
        """Write the mutant, run its tests, restore the source.

        Raises:
            ValueError: the mutant is stale, or its tests cannot be run.
        """
        path = self._tree / mutant.path
        whole = path.read_text()
        self._write(path, mutant.apply(whole))
        begun = time.monotonic()
        try:
            code, said = self._pytest(mutant.tests, self._limit)
        finally:
            self._write(path, whole)
        took = time.monotonic() - begun
        if code is None:
            return Trial(mutant, "hung", took)
        if code not in (_PASSED, _FAILED, _INTERRUPTED, _INTERNAL):
            raise ValueError(f"{mutant}: its tests cannot be run, pytest exited {code}: {said[-500:]}")
        failed = next((line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        return Trial(mutant, "survived" if code == _PASSED else "killed", took, failed[:160])

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        self._moment += 10
        os.utime(path, (self._moment, self._moment))

    def _pytest(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return exit code (None: over the limit) and output. No process that the tests started remains."""
        mark, scratch = uuid.uuid4().hex, self._folder / "scratch"
        self._mark = mark
        scratch.mkdir()
        said = scratch / "said.txt"
        words = [
            "-x",
            "-q",
            "-rfE",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "not gpu and not ray and not ecosystem",
        ]
        words += ["--basetemp", str(scratch / "pytest"), *(f"tests/{test}" for test in tests)]
        environment = {MARK: mark, "CI": "1", "TMPDIR": str(scratch)}
        order = {"arguments": words, "environment": environment, "said": str(said), "limit": limit}
        code = self._ask(json.dumps(order))
        _end_all(mark)
        self._mark = ""
        told = said.read_text(errors="replace") if said.exists() else ""
        shutil.rmtree(scratch, ignore_errors=True)
        return code, told

    def _ask(self, order: str) -> int | None:
        if self._zygote is None:
            python = self._folder / "venv" / "bin" / "python"
            ours = ("PYTHONPATH", "PYTEST_ADDOPTS")  # a copy has separate paths and a separate cache
            environment = {key: value for key, value in os.environ.items() if key not in ours}
            self._zygote = subprocess.Popen(
                [str(python), "-m", "mutants.zygote"],
                cwd=self._tree, env=environment | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        zygote = self._zygote
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        if self._fresh:
            self._fresh = False
            zygote.stdout.readline()
        zygote.stdin.write(order + "\n")
        zygote.stdin.flush()
        answer: int | None = json.loads(zygote.stdout.readline())
        return answer


def _end_all(mark: str) -> None:
    """Kill every process with the mark, including processes that these start in the meantime."""
    while found := [process for process in psutil.process_iter() if _carries(process, mark)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=10)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False
