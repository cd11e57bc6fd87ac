"""Looks at runs, kept between requests: of what a job said only what is new is read again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from posttrain.views.status import RunStatus, RunWatcher

if TYPE_CHECKING:
    from posttrain.workspace.opened import OpenWorkspace

MOST = 256  # runs
_SHARED = 0.4  # seconds that a look serves everybody who watches


class _Known:
    """One run."""

    def __init__(self, watcher: RunWatcher) -> None:
        self.watcher, self.alone = watcher, threading.Lock()
        self.status: RunStatus | None = None
        self.at = -_SHARED


class Watchers:
    """One for each run that was looked at lately; one request at a time reads each."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, workspace: OpenWorkspace, run_id: str, age: float = 0.0) -> RunStatus:
        """A run as it is now.

        Args:
            workspace: as whoever asks sees it.
            age: seconds that a look of somebody else may be old.

        Raises:
            NotFoundError: there is no such run in the project.
        """
        key = workspace.ledger.project, run_id
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        known = known or _Known(RunWatcher(workspace, run_id))
        with known.alone:
            if known.status is None or time.monotonic() - known.at >= age:
                known.status = known.watcher.read()
                known.at = time.monotonic()
            status = known.status
        with self._lock:  # only what is there is kept
            self._known.setdefault(key, known)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        return status


class Looking:
    """What `Runs.watcher` gives, over what is kept: many who watch a run cost what one of them does."""

    def __init__(self, watchers: Watchers, workspace: OpenWorkspace, run_id: str) -> None:
        self._watchers, self._workspace, self._run_id = watchers, workspace, run_id

    def read(self) -> RunStatus:
        """The run as it is now, or was a moment ago."""
        return self._watchers.read(self._workspace, self._run_id, _SHARED)
