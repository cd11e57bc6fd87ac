"""Looks at runs, kept between requests: of what a job said only what is new is read again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from posttrain.views.status import RunStatus, RunWatcher

if TYPE_CHECKING:
    from posttrain.workspace.opened import OpenWorkspace

MOST = 256  # runs


class Watchers:
    """One for each run that was looked at lately; one request at a time reads each."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[RunWatcher, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, workspace: OpenWorkspace, run_id: str) -> RunStatus:
        """A run as it is now.

        Args:
            workspace: as whoever asks sees it.

        Raises:
            NotFoundError: there is no such run in the project.
        """
        key = workspace.ledger.project, run_id
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            found = RunWatcher(workspace, run_id), threading.Lock()
        watcher, alone = found
        with alone:
            status = watcher.read()
        with self._lock:  # only what is there is kept
            self._known.setdefault(key, found)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        return status


class Looking:
    """What `Runs.watcher` gives, over what is kept."""

    def __init__(self, watchers: Watchers, workspace: OpenWorkspace, run_id: str) -> None:
        self._watchers, self._workspace, self._run_id = watchers, workspace, run_id

    def read(self) -> RunStatus:
        """The run as it is now."""
        return self._watchers.read(self._workspace, self._run_id)
