"""The driver of a server, a process that `workers.start` starts.

The driver drives every unfinished run of every project of a served workspace, seals events, and delivers them to the
projects' sinks. It may be killed at any line: the ledger contains the remaining work, jobs continue, and the server
starts another driver. For any number of runs, an idle driver sends less than two statements a second, and one more for
each project with sinks.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from posttrain.app.driver import Driver
from posttrain.app.workspace import Workspace, serve_jobs
from posttrain.domain.errors import PosttrainError
from posttrain.execution.processes import process_name
from posttrain.server.logs import Logging, Printed, begin, say_of_driver
from posttrain.server.metrics import SharedCounters
from posttrain.store.grants import Granting
from posttrain.store.work import open_runs

_EVERY = 1.5  # seconds between two queries for runs
_GIVEN_UP = 60.0  # seconds between two passes over a run that was given up
_SHOW = 1.0  # seconds between two updates of the counters


class OpenRuns:
    """The unfinished runs of every project, from one query.

    Args:
        granting: renews the server's grants to running jobs.
        counters: receives the number and duration of passes, and the number of ledger errors.
    """

    def __init__(
        self,
        workspace: Workspace,
        say: Callable[[str], None],
        granting: Granting | None = None,
        counters: SharedCounters | None = None,
    ) -> None:
        self._workspace, self._say, self._granting, self._counters = workspace, say, granting, counters
        self._wanted: dict[str, list[str]] = {}
        self._resting: dict[str, float] = {}  # run that was given up → time at which to drive it again
        self._asked, self._began, self._shown = -_EVERY, 0.0, 0.0
        self.passes, self.spent, self.errors = 0, 0.0, 0

    def wanted(self) -> dict[str, list[str]]:
        """See `Wanted.wanted`; the most urgent runs come first."""
        self._began = now = time.monotonic()
        if now - self._asked >= _EVERY:
            self._asked = now
            try:
                self._wanted = open_runs(self._workspace.ledger.database, self._workspace.jobs.host, process_name())
                if self._granting is not None:
                    self._granting.keep()
            except PosttrainError as error:  # the database is unreachable; the next round tries again
                self.errors += 1
                self._say(f"the ledger cannot be used: {error}")
        return {
            project: [one for one in runs if self._resting.get(one, 0.0) <= now]
            for project, runs in self._wanted.items()
        }

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """See `Wanted.done`."""
        self._wanted = {project: [one for one in runs if one != run_id] for project, runs in self._wanted.items()}

    def give_up(self, run_id: str, trouble: str) -> None:
        """See `Wanted.give_up`. The run is driven again after `_GIVEN_UP` seconds, as the cause may be fixed then."""
        self._resting[run_id] = time.monotonic() + _GIVEN_UP

    def over(self) -> bool:
        """Return whether the server has ended: stdin is a socket to the server, which never writes to it."""
        now = time.monotonic()
        self.passes, self.spent = self.passes + 1, self.spent + now - self._began
        if self._counters is not None and now - self._shown >= _SHOW:
            self._shown = now
            self._counters.write({"passes": self.passes, "seconds": self.spent, "errors": self.errors, "at": now})
        return bool(select.select([sys.stdin.fileno()], [], [], 0.0)[0])


def main(root: Path, words: list[str]) -> int:
    """Drive runs until a signal arrives or the server ends.

    Args:
        words: arguments for the log, followed by the descriptor of the counters.
    """
    begin(Logging.of(words))
    sys.stdout = sys.stderr = Printed()
    try:
        workspace = Workspace(root)
    except PosttrainError as error:
        say_of_driver(f"error: {error}")
        return error.exit_code
    granting = serve_jobs(workspace)
    runs = OpenRuns(workspace, say_of_driver, granting, SharedCounters(int(words[2])) if len(words) > 2 else None)
    driver = Driver(workspace, runs, say_of_driver, served=True)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, driver.end)
    say_of_driver(f"driver {os.getpid()} of {root}")
    try:
        driver.drive()
    finally:
        workspace.close()
        say_of_driver("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
