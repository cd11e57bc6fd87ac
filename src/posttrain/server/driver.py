"""The driver of a server (`children.start`): drives every unfinished run of every project of a served workspace, seals
what happened, and has it delivered to the projects' sinks.

It may be killed at any line: the ledger says what is to be done, the jobs go on, and the server starts another one.
Idle it asks less than two statements a second, and one more for each project with sinks, however many runs there are.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from posttrain.app.background import Background
from posttrain.app.runs import REPORTING, load_ahead
from posttrain.app.sinks import deliverer
from posttrain.app.workspace import Workspace, serve_jobs
from posttrain.control.owners import process_name
from posttrain.domain.errors import PosttrainError
from posttrain.domain.ids import DRIVER
from posttrain.drivers.log import DriverLog
from posttrain.events.bus import Deliverer
from posttrain.server.attempts import Granting
from posttrain.server.logs import DriverLines, Logging, begin
from posttrain.server.metering import Board
from posttrain.store.grants import Grants
from posttrain.store.work import open_runs

AUTH = "server"
_EVERY = 1.5  # seconds between two looks for runs
_SEAL = 2.0  # seconds between two looks for events to seal
_SINKS = 10.0  # seconds between two looks for projects that have sinks
_GIVEN_UP = 60.0  # seconds between two looks at a run that failed for long
_SHOW = 1.0  # seconds between two looks of others at what it does
_PAUSE = 0.1  # seconds between passes that change nothing


class OpenRuns:
    """The unfinished runs of one project; who asks for them need not ask for each."""

    homeless = False

    def __init__(self) -> None:
        self._wanted: list[str] = []
        self._resting: dict[str, float] = {}  # runs that were given up → when to look again
        self._stopped = False

    def take(self, runs: list[str]) -> None:
        """What there is now."""
        self._wanted = runs

    def wanted(self) -> list[str]:
        """The runs to drive."""
        now = time.monotonic()
        return [] if self._stopped else [one for one in self._wanted if self._resting.get(one, 0.0) <= now]

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Be done with a run that has ended."""
        self._wanted = [one for one in self._wanted if one != run_id]

    def give_up(self, run_id: str, trouble: str) -> None:
        """It failed for long: look at it now and then, for a person may have mended it."""
        self._resting[run_id] = time.monotonic() + _GIVEN_UP

    def stop(self) -> None:
        """Take nothing any more."""
        self._stopped = True

    def close(self, let_go: Callable[[], None]) -> bool:
        """Never: runs may come at any time."""
        return False


class Upkeep:
    """Seals, and lets events be delivered; each at its own pace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._sealed = self._asked = 0.0
        self._deliverers: dict[str, tuple[Deliverer, float]] = {}  # and when it is to look again

    def step(self) -> None:
        """What is due.

        Raises:
            PosttrainError: the ledger is away; do it again later.
        """
        now = time.monotonic()
        if self._workspace.hosts is not None:
            self._workspace.hosts.beat()
        if now - self._sealed >= _SEAL:
            self._sealed = now
            self._workspace.seal(keep=False)
        if now - self._asked >= _SINKS:
            self._asked = now
            self._find()
        for project, (one, at) in list(self._deliverers.items()):
            if now >= at:
                self._deliverers[project] = one, now + one.step()

    def _find(self) -> None:
        with self._workspace.ledger.snapshot() as now:
            wanted = now.projects_with_sinks()
        for project in self._deliverers.keys() - wanted:
            self._deliverers.pop(project)[0].close()
        for project in wanted - self._deliverers.keys():
            self._deliverers[project] = deliverer(self._workspace.seen_by(DRIVER, project, AUTH), served=True), 0.0

    def close(self) -> None:
        """Begin no delivery any more."""
        for one, _ in self._deliverers.values():
            one.close()


class Driver:
    """Over all projects of a workspace."""

    def __init__(
        self, workspace: Workspace, log: DriverLog, board: Board | None = None, granting: Granting | None = None
    ) -> None:
        self._workspace, self._log, self._board, self._granting = workspace, log, board, granting
        self._passes = self._errors = 0
        self._spent = self._shown = 0.0
        self._upkeep = Upkeep(workspace)
        self._projects: dict[str, tuple[OpenRuns, Background]] = {}
        self._asked = -_EVERY
        self._over = threading.Event()
        self._kept = ExitStack()  # the leases of every project, also while one run takes long

    def end(self, *_: object) -> None:
        """End after this pass, for a signal."""
        self._over.set()

    def run(self) -> None:
        """Until somebody says so, or the server is gone, which holds the other end of stdin and never writes there."""
        while not self._over.is_set() and not select.select([sys.stdin.fileno()], [], [], 0.0)[0]:
            if not self.look():
                self._log.bound()
                self._over.wait(_PAUSE)
        self.close()

    def look(self) -> bool:
        """One pass over everything; whether anything changed."""
        began = time.monotonic()
        changed = self._pass()
        self._passes, self._spent = self._passes + 1, self._spent + time.monotonic() - began
        self._show()
        return changed

    def _show(self) -> None:
        """What it has done, now and then."""
        now = time.monotonic()
        if self._board is not None and now - self._shown >= _SHOW:
            self._shown = now
            self._board.write({"passes": self._passes, "seconds": self._spent, "errors": self._errors, "at": now})

    def _pass(self) -> bool:
        try:
            self._find()
            self._upkeep.step()
            if self._granting is not None:
                self._granting.keep()
        except PosttrainError as error:  # a database that is away: the next time
            self._errors += 1
            self._log.say(f"the ledger cannot be used: {error}")
            self._over.wait(_EVERY)
        changed = False
        for _, background in list(self._projects.values()):
            changed = background.pass_over() or changed
        return changed

    def close(self) -> None:
        """Give the leases back. Jobs go on."""
        for _, background in self._projects.values():
            background.leave()
        self._kept.close()
        self._upkeep.close()

    def _find(self) -> None:
        if time.monotonic() - self._asked < _EVERY:
            return
        self._asked = time.monotonic()
        found = open_runs(self._workspace.ledger.database, self._workspace.jobs.host, process_name())
        for project in found.keys() - self._projects.keys():
            runs, seen = OpenRuns(), self._workspace.seen_by(DRIVER, project, AUTH)
            self._projects[project] = runs, Background(seen, runs, self._log)
            self._kept.enter_context(seen.reconciler.kept())
        for project, (runs, _) in self._projects.items():
            runs.take(found.get(project, []))


def main(root: Path, words: list[str]) -> int:
    """Drive until told to end.

    Args:
        words: how it logs, and the descriptor of the board on which it shows what it does.
    """
    begin(Logging.of(words))
    log = DriverLines()
    log.take_over()
    try:
        workspace = Workspace(root)
    except PosttrainError as error:
        log.say(f"error: {error}")
        return error.exit_code
    granting = Granting(root, Grants(workspace.ledger.database, workspace.ledger.clock), workspace.jobs.host)
    serve_jobs(workspace, granting)
    driver = Driver(workspace, log, Board(int(words[2])) if len(words) > 2 else None, granting)
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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
