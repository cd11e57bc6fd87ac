"""What the jobs of a run printed, and the watch over a run that somebody else drives, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.control.jobs import job_of
from posttrain.domain.errors import DeadlineError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import AttemptRecord, RunRecord
from posttrain.domain.requests import JobRef
from posttrain.drivers.requests import DriverKind, run_driver
from posttrain.execution.ports import Executor
from posttrain.store.hosts import Host
from posttrain.views.since import named, stage_attempts
from posttrain.workspace.opened import OpenWorkspace

_ALONE = 5.0  # seconds without a driver before that is told: from one driver to the next takes less


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
    found: list[LogFile] = []
    known: dict[str, Host] = {}
    for _, attempt, folder in stage_attempts(workspace, run_id, stage):
        job, why = job_of(workspace.jobs.folders, attempt), ""
        if workspace.hosts is not None and workspace.jobs.elsewhere(attempt):
            known = known or {one.id: one for one in workspace.hosts.all()}
            why = not_here(attempt, known.get(str(attempt.host)))
        place = (attempt.run_id, attempt.stage, attempt.number)
        found.append(LogFile(*place, folder.log, job, workspace.jobs.executor, why))
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


class Vigil:
    """Waiting for a run that somebody else is to drive: says when nobody does, and ends at a deadline.

    Args:
        say: told one line each time the run is left alone.
        timeout: seconds; None: until the run ends, however long that takes.
    """

    def __init__(
        self, workspace: OpenWorkspace, run_id: str, say: Callable[[str], None], timeout: float | None
    ) -> None:
        self._workspace, self._run_id, self._say, self._timeout = workspace, run_id, say, timeout
        self._started = self._driven_at = workspace.ledger.clock.now()
        self._told = False

    def look(self) -> RunRecord:
        """The run as it is now.

        Raises:
            DeadlineError: the time is up and the run is not final.
        """
        run, now = self._workspace.ledger.run(self._run_id), self._workspace.ledger.clock.now()
        if is_final("run", run.state):
            return run
        driver = run_driver(self._workspace.root, run, now)
        if driver is not None and driver.kind is not DriverKind.NONE:
            self._driven_at, self._told = now, False
        elif not self._told and now - self._driven_at >= _ALONE:
            self._told = True
            self._say(f"nobody drives this run ({run.state}): posttrain attach {run.id} drives it on; still waiting")
        if self._timeout is not None and now - self._started >= self._timeout:
            raise DeadlineError(
                f"run {run.id}: still {run.state} after {self._timeout:g} s of watching; see posttrain why {run.id}"
            )
        return run

    def rest(self, seconds: float) -> None:
        """Until the next look."""
        self._workspace.ledger.clock.sleep(seconds)
