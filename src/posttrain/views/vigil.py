"""Watching a run that somebody else drives, until it ends."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.domain.errors import DeadlineError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord
from posttrain.drivers.requests import DriverKind, run_driver
from posttrain.workspace.opened import OpenWorkspace

_ALONE = 5.0  # seconds without a driver before that is told: from one driver to the next takes less


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
