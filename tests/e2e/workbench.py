"""A folder with a workspace in it, and the public command run in it as real processes, watched from outside."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.app.workspace import Workspace
from posttrain.domain.jobs import Fact, Note, Progress
from posttrain.domain.lifecycle import INITIAL, TABLES, is_final
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import AttemptFolder
from posttrain.store.sealer import verify_chain

PATIENCE = 400.0  # seconds any single step may take, on a machine as busy as it likes
_MODULES = {"job": "posttrain.jobs.", "supervisor": "posttrain.execution.executors.local.supervisor"}
_STARTERS = ("podman", "conmon", "runc", "crun")  # whose words are those of the job in their container
_REWARD_WORKER = "posttrain.sandbox.worker"
_PRELOAD = "posttrain.jobs.preload"  # a fork server names it, and the attempt that it was started for


@dataclass(frozen=True, slots=True)
class Finished:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its one line on stderr, but for what `eval` begins with."""
        lines = [line for line in self.err.splitlines() if line.strip() and not line.startswith("planning to measure")]
        assert len(lines) == 1, f"an error is one line on stderr, got {self.err!r}"
        assert "Traceback" not in self.out + self.err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    @property
    def json(self) -> Any:
        """What it printed with `-o json`."""
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Live:
    """A process that works on an attempt: `kind` is job or supervisor."""

    pid: int
    kind: str
    attempt: Path


class Workbench:
    """One workspace and the processes that belong to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / ".posttrain"
        self.pids: defaultdict[Path, set[int]] = defaultdict(set)  # attempt folder → job processes ever seen in it
        self.started: list[subprocess.Popen[str]] = []
        self.python = sys.executable
        self.environment: dict[str, str] = {}  # of every command

    def copy(self, folder: Path) -> Workbench:
        """The same workspace at another place. Somebody may be reading the ledger meanwhile: SQLite copies it."""
        shutil.copytree(self.folder, folder, symlinks=True, ignore=shutil.ignore_patterns("ledger.db*"))
        if (self.root / "ledger.db").exists():
            ledgers = [sqlite3.connect(place / ".posttrain" / "ledger.db") for place in (self.folder, folder)]
            with closing(ledgers[0]) as source, closing(ledgers[1]) as target:
                source.backup(target)
        return Workbench(folder)

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """`posttrain ARGUMENTS…` in the folder, in a session of its own as if typed in another terminal."""
        process = subprocess.Popen(
            # a suite under nohup, or in the background of a shell, is started with signals ignored, and hands that down
            ["env", "--default-signal=INT,HUP", self.python, "-P", "-m", "posttrain", *arguments],
            cwd=self.folder,
            env=self.variables(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def variables(self, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a command."""
        return _environment({**self.environment, **(changes or {})})

    def finish(self, process: subprocess.Popen[str]) -> Finished:
        """Wait for a command."""
        out, err = process.communicate(timeout=PATIENCE)
        return Finished(process.returncode, out, err)

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, code: int | None = 0) -> Finished:
        """`posttrain ARGUMENTS…` to its end; `code` is the exit code it must have (None: any)."""
        ended = self.finish(self.start(*arguments, env=env))
        assert code in (None, ended.code), (
            f"posttrain {' '.join(arguments)} exited {ended.code}: {ended.out}{ended.err}"
        )
        return ended

    def write(self, name: str, content: str | Mapping[str, Any]) -> Path:
        """A file in the folder: text, or a map as YAML."""
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(dict(content), sort_keys=False))
        return path

    @contextmanager
    def open(self) -> Iterator[Workspace]:
        """The workspace, for looking."""
        workspace = Workspace(self.root)
        try:
            yield workspace
        finally:
            workspace.close()

    def run_id(self) -> str:
        """The newest run."""
        with self.open() as workspace:
            return workspace.ledger.runs(limit=1)[0].id

    def wait_run(self, started: Collection[str] = ()) -> str:
        """The newest run, once it is not among those that had started before."""
        return str(self.wait("a run", lambda: next(iter(self.run_ids() - set(started)), None)))

    def run_ids(self) -> set[str]:
        """Every run."""
        with self.open() as workspace:
            return {run.id for run in workspace.ledger.runs(limit=1000)}

    def outputs(self, run_id: str) -> dict[str, str]:
        """Digest of each stage's model."""
        with self.open() as workspace:
            stages = workspace.ledger.stages(run_id)
        return {stage.name: stage.outputs["model"]["digest"] for stage in stages if "model" in stage.outputs}

    def attempts(self, run_id: str, stage: str | None = None) -> list[AttemptRecord]:
        """The attempts of a run, or of one of its stages."""
        with self.open() as workspace:
            return workspace.ledger.attempts(run_id, stage)

    def facts(self, attempt: AttemptRecord) -> list[Fact]:
        """What the attempt's job said."""
        return AttemptFolder(self.root / attempt.folder).facts()[0]

    def steps(self, attempt: AttemptRecord) -> list[int]:
        """The steps the attempt's job reported as done."""
        return [fact.step for fact in self.facts(attempt) if isinstance(fact, Progress)]

    def resumed_at(self, attempt: AttemptRecord) -> int | None:
        """The step of the checkpoint the job says it went on from; None when it began at the beginning."""
        prefix = "resumed from the checkpoint at step "
        notes = [fact.message for fact in self.facts(attempt) if isinstance(fact, Note)]
        return next((int(note.removeprefix(prefix)) for note in notes if note.startswith(prefix)), None)

    def live(self, kind: str | None = None) -> list[Live]:
        """Jobs and supervisors of this workspace. Each look also checks that no stage has two jobs at a time."""
        found = list(_processes(self.root))
        jobs = [process for process in found if process.kind == "job"]
        for job in jobs:
            self.pids[job.attempt].add(job.pid)
        crowd = Counter(job.attempt.parent for job in jobs)
        assert all(count == 1 for count in crowd.values()), f"two live jobs in one stage: {jobs}"
        return [process for process in found if kind in (None, process.kind)]

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """Look again and again until `condition` holds; what it returned."""
        until = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < until, f"{what}: not within {PATIENCE:g} s in {self.folder}"
            self.live()
            time.sleep(0.03)
        return found

    def wait_job(self) -> Live:
        """The first job process to be seen."""
        jobs: list[Live] = self.wait("a running job", lambda: self.live("job"))
        return jobs[0]

    def wait_end(self, process: Live) -> None:
        """That process does not run any more."""
        self.wait(f"the end of {process.kind} {process.pid}", lambda: process not in self.live())

    def wait_quiet(self) -> None:
        """Nothing of this workspace runs any more."""
        self.wait("no process left", lambda: not self.live() and not _orphaned_rewards())

    def check(self, run_id: str, state: str = "succeeded") -> None:
        """What must hold whatever happened: final states, legal moves, one job per attempt, a chain, no orphans."""
        self.wait_quiet()
        with self.open() as workspace:
            run, stages = workspace.ledger.run(run_id), workspace.ledger.stages(run_id)
            attempts, report = workspace.ledger.attempts(run_id), verify_chain(workspace.ledger)
            events = workspace.ledger.events(subject_prefix=run_id, limit=100_000)
        assert (run.state, run.lease_owner, report.pending) == (state, None, 0)
        assert all(is_final("stage", stage.state) for stage in stages if state == "succeeded")
        assert all(is_final("attempt", attempt.state) for attempt in attempts)
        ended = Counter(attempt.stage for attempt in attempts if attempt.state == "succeeded")
        assert all(count == 1 for count in ended.values()), f"a stage succeeded twice: {attempts}"
        assert all(len(pids) == 1 for pids in self.pids.values()), f"an attempt had several jobs: {dict(self.pids)}"
        states: dict[str, str] = {}
        for event in events:
            machine, _, moved = event.kind.partition(".")
            if machine not in ("run", "stage", "attempt") or moved in ("updated", "cached"):
                continue
            before = states.get(event.subject)
            assert event.payload.get("from") == before, f"{event.subject}: {event} follows {before}"
            legal = (INITIAL[machine],) if before is None else TABLES[machine][before]
            assert moved in legal, f"{event.subject}: {before} → {moved}"
            states[event.subject] = moved
        assert states[run_id] == state

    def clean(self) -> None:
        """End what a failed test left running."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            with suppress(subprocess.TimeoutExpired):  # a child that outlives it keeps its output open
                process.communicate(timeout=PATIENCE)
        for left in _processes(self.root):
            with suppress(ProcessLookupError):
                os.kill(left.pid, 9)


@dataclass(frozen=True, slots=True)
class Reference:
    """An undisturbed run, and the workspace it was made in: never written to, only copied."""

    bench: Workbench
    run_id: str
    outputs: Mapping[str, str]  # stage → digest of its model


def _environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("POSTTRAIN_")}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "NO_COLOR": "1"} | dict(changes or {})


def _processes(root: Path) -> Iterator[Live]:
    """Those whose command line names an attempt of the workspace.

    A child shows its parent's command line from its fork until its exec (a job that starts its reward worker, say): it
    is no job of its own. A second job would be the child of a supervisor.
    """
    for pid, words in _command_lines(f"{root}/"):
        if _words(_parent(pid)) == words or Path(words[0]).name in _STARTERS:
            continue
        kind = next((kind for kind, module in _MODULES.items() if any(w.startswith(module) for w in words)), None)
        attempt = next((Path(word) for word in words if word.startswith(f"{root}/")), None)
        if kind and attempt and _PRELOAD not in words:
            yield Live(pid, kind, attempt)


def _orphaned_rewards() -> list[int]:
    """Reward workers whose job is gone; the last word of their command line is the job's process id."""
    found = []
    for pid, words in _command_lines(_REWARD_WORKER):
        if _REWARD_WORKER in words and not Path(f"/proc/{words[-1]}/cmdline").exists():
            found.append(pid)
    return found


def _command_lines(said: str) -> Iterator[tuple[int, list[str]]]:
    """Those in which that stands; they are looked at thirty times a second, so the others are not taken apart."""
    sought = os.fsencode(said)
    for name in filter(str.isdigit, os.listdir("/proc")):
        line = _command_line(int(name))
        if sought in line:
            yield int(name), _split(line)


def _words(pid: int) -> list[str]:
    """A command line; empty for a process that is gone or a zombie."""
    return _split(_command_line(pid))


def _split(line: bytes) -> list[str]:
    return [word for word in line.decode(errors="replace").split("\0") if word]


def _command_line(pid: int) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:  # gone while we looked
        return file.read()
    return b""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
