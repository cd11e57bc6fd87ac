"""What the jobs of a run printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.control.jobs import job_of
from posttrain.domain.errors import NotFoundError, nearest
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import AttemptRecord, RunRecord
from posttrain.domain.requests import JobRef
from posttrain.execution.ports import Executor
from posttrain.store.hosts import Host
from posttrain.views.since import named
from posttrain.workspace.opened import OpenWorkspace


@dataclass(frozen=True, slots=True)
class LogFile:
    """One attempt's log."""

    run_id: str
    stage: str
    attempt: int
    path: Path
    job: JobRef
    executor: Executor
    elsewhere: str = ""  # why it cannot be read here

    def read(self, start: int = 0) -> tuple[str, int]:
        """Text from byte `start`, and where the next read starts. A log that is not there yet is empty."""
        if self.elsewhere:
            return ("", start) if start else (f"{self.elsewhere}\n", 1)
        page = self.executor.logs(self.job, start)
        return page.text, page.cursor


def log_files(workspace: OpenWorkspace, run_id: str, stage: str | None = None) -> list[LogFile]:
    """The logs of a run's attempts in order; of a reused stage, those of where it was computed.

    Raises:
        NotFoundError: the run has no such stage.
    """
    rows = workspace.ledger.stages(run_id)
    if stage is not None and stage not in {row.name for row in rows}:
        raise NotFoundError(f"run {run_id} has no stage {stage!r}{nearest(stage, [row.name for row in rows])}")
    found: list[LogFile] = []
    known: dict[str, Host] = {}
    for row in rows:
        if stage not in (None, row.name):
            continue
        origin, _, name = (row.cached_from or f"{run_id}/{row.name}").rpartition("/")
        for attempt in workspace.ledger.attempts(origin, name):
            folder = workspace.jobs.folders.of(attempt)
            job, why = job_of(workspace.jobs.folders, attempt), ""
            if workspace.hosts is not None and workspace.jobs.elsewhere(attempt):
                known = known or {one.id: one for one in workspace.hosts.all()}
                why = not_here(attempt, known.get(str(attempt.host)))
            found.append(LogFile(origin, name, attempt.number, folder.log, job, workspace.jobs.executor, why))
    return found


def not_here(attempt: AttemptRecord, host: Host | None) -> str:
    """Where an attempt ran that did not run here, in one line."""
    return f"attempt {attempt.number} of {attempt.stage} is on host {named(host) if host else attempt.host}: ask there"


def read_all(workspace: OpenWorkspace, run_id: str, stage: str | None) -> Iterator[tuple[LogFile, str]]:
    """Everything printed so far, piece by piece."""
    for log in log_files(workspace, run_id, stage):
        start = 0
        while True:
            text, start = log.read(start)
            if not text:
                break
            yield log, text


def follow(
    workspace: OpenWorkspace, run_id: str, stage: str | None, look: Callable[[], RunRecord], interval: float = 0.3
) -> Iterator[tuple[LogFile, str]]:
    """Pieces of log as they come, until the run has ended and everything was read.

    Args:
        look: at the run, as `Vigil.look`; what it raises ends this.
    """
    read: dict[Path, int] = {}
    while True:
        over = is_final("run", look().state)
        quiet = True
        for log in log_files(workspace, run_id, stage):
            text, read[log.path] = log.read(read.get(log.path, 0))
            if text:
                quiet = False
                yield log, text
        if over and quiet:
            return
        if quiet:
            workspace.ledger.clock.sleep(interval)
