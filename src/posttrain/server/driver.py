"""`python -m posttrain.server.driver ROOT`: drives every unfinished run of every project of a served workspace.

It may be killed at any line: the ledger says what is to be done, the jobs go on, and the server starts another one.
One statement a second asks which runs there are, however many they are; each of them costs what looking at it costs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from posttrain.app.background import Background
from posttrain.app.runs import REPORTING, load_ahead
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import PosttrainError
from posttrain.drivers.log import DriverLog, Veil
from posttrain.store.work import open_runs

ACTOR, AUTH = "service:posttrain", "server"
LOG = "server-driver.log"
_EVERY = 1.0  # seconds between two looks for runs
_PAUSE = 0.1  # seconds between passes that change nothing


class OpenRuns:
    """The unfinished runs of one project; who asks for them need not ask for each."""

    homeless = False

    def __init__(self) -> None:
        self._wanted: list[str] = []
        self._stopped = False

    def take(self, runs: list[str]) -> None:
        """What there is now."""
        self._wanted = runs

    def wanted(self) -> list[str]:
        """The runs to drive."""
        return [] if self._stopped else list(self._wanted)

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Be done with a run that has ended."""
        self._wanted = [one for one in self._wanted if one != run_id]

    def give_up(self, run_id: str, trouble: str) -> None:
        """The queue set it aside, or will: nothing to be said here."""

    def stop(self) -> None:
        """Take nothing any more."""
        self._stopped = True

    def close(self, let_go: Callable[[], None]) -> bool:
        """Never: runs may come at any time."""
        return False


class Driver:
    """Over all projects of a workspace."""

    def __init__(self, workspace: Workspace, log: DriverLog) -> None:
        self._workspace, self._log = workspace, log
        self._projects: dict[str, tuple[OpenRuns, Background]] = {}
        self._asked = -_EVERY
        self._over = threading.Event()

    def end(self, *_: object) -> None:
        """End after this pass, for a signal."""
        self._over.set()

    def run(self) -> None:
        """Until somebody says so, or the server that started it is gone."""
        parent = os.getppid()
        while not self._over.is_set() and os.getppid() == parent:
            changed = False
            try:
                self._find()
            except PosttrainError as error:  # a database that is away: the next time
                self._log.say(f"runs cannot be read: {error}")
                self._over.wait(_EVERY)
            for _, background in list(self._projects.values()):
                changed = background.pass_over() or changed
            if not changed:
                self._log.bound()
                self._over.wait(_PAUSE)
        for _, background in self._projects.values():
            background.leave()

    def _find(self) -> None:
        if time.monotonic() - self._asked < _EVERY:
            return
        self._asked = time.monotonic()
        found = open_runs(self._workspace.ledger.database)
        for project in found.keys() - self._projects.keys():
            runs, seen = OpenRuns(), self._workspace.seen_by(ACTOR, project, AUTH)
            self._projects[project] = runs, Background(seen, runs, self._log)
            seen.reconciler.keep()
        for project, (runs, _) in self._projects.items():
            runs.take(found.get(project, []))


def main(root: Path) -> int:
    """Drive until told to end."""
    log = DriverLog(root / LOG, Veil(os.environ))
    log.take_over()
    try:
        workspace = Workspace(root)
    except PosttrainError as error:
        log.say(f"error: {error}")
        return error.exit_code
    driver = Driver(workspace, log)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, driver.end)
    log.say(f"driver {os.getpid()} of {root}")
    load_ahead(REPORTING)
    try:
        driver.run()
    finally:
        workspace.close()
        log.say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
