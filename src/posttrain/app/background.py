"""`python -m posttrain.app.background WORKSPACE KEY`: the process that drives unattended runs.

Loops and what each one starts::

    detach ──writes──▶ drivers/runs/RUN.json ──▶ Ears (a thread): takes this environment's requests
                                                   │ wanted runs
                                                   ▼
    main thread: `app.driver`, until no request is left

The process may be killed at any line: the requests and the ledger contain the remaining work, jobs continue, and the
next driver (a command in the foreground, or the next background driver of this environment) continues from there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from posttrain.app.driver import Driver
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.execution.processes import process_name
from posttrain.workspace.background import (
    FOLDER,
    LOCK_VARIABLE,
    DriverLog,
    Request,
    Veil,
    fingerprint,
    log_path,
    previous,
    read_request,
    remove_request,
    requested,
    requests_held,
    runs_folder,
    write_request,
)

_LISTEN = 0.1  # seconds between two checks for requests
_LOGS = 8  # logs of former drivers that are retained


class Ears(threading.Thread):
    """Takes requests while the main thread drives a run, because `detach` waits until its request is taken.

    Args:
        project: the project of the runs.
        let_go: releases the lock for the next driver; called when no run is wanted.
    """

    def __init__(
        self, root: Path, key: str, project: str, say: Callable[[str], None], let_go: Callable[[], None]
    ) -> None:
        super().__init__(name="ears", daemon=True)
        self._root, self._key, self._project, self._say, self._let_go = root, key, project, say, let_go
        self._mine = process_name()
        self._wanted: list[str] = []  # replaced as a whole, while the requests are locked
        self._seen: object = None
        self._deaf = False
        self._said = ""

    def run(self) -> None:
        """Accept requests for runs until the process ends."""
        while True:
            self.listen()
            time.sleep(_LISTEN)

    def listen(self) -> None:
        """Accept new requests, and drop withdrawn requests."""
        try:
            state = fingerprint(self._root)
            if state != self._seen:
                with self._held():
                    self._take()
                self._seen = state  # later writes change the fingerprint, and are read the next time
                crashpoint("driver.after_taken")
        except (PosttrainError, OSError) as error:  # a full disk; a file that was removed between two checks
            if self._said != str(error):
                self._said = str(error)
                self._say(f"requests cannot be read: {error}")

    def _held(self) -> AbstractContextManager[None]:
        """Lock the requests; lock nothing if the workspace was removed or moved."""
        return requests_held(self._root) if runs_folder(self._root).is_dir() else nullcontext()

    def wanted(self) -> dict[str, list[str]]:
        """See `Wanted.wanted`; the runs are in the order of the requests."""
        return {self._project: self._wanted}

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """See `Wanted.done`."""
        with requests_held(self._root):
            if over():
                request = self._read(run_id)
                if request is not None and request.key == self._key:
                    remove_request(self._root, run_id)
                self._wanted = [one for one in self._wanted if one != run_id]

    def give_up(self, run_id: str, trouble: str) -> None:
        """See `Wanted.give_up`: the request records the error."""
        with requests_held(self._root):
            request = read_request(self._root, run_id)
            if request is not None and request.owner == self._mine:
                write_request(self._root, replace(request, owner="", trouble=trouble))
            self._wanted = [one for one in self._wanted if one != run_id]

    def stop(self) -> None:
        """Accept no more requests."""
        self._deaf = True

    def over(self) -> bool:
        """Stop accepting requests if no run is wanted, and return True; later requests start another driver."""
        if self._wanted:
            return False
        try:
            with self._held():
                self._take()
                if self._wanted:
                    return False
                self.stop()
                self._let_go()
                return True
        except (PosttrainError, OSError) as error:
            self._say(str(error))
            return False

    def _take(self) -> None:
        if self._deaf:
            return
        requests = [request for request in map(self._read, requested(self._root)) if request is not None]
        mine = [request for request in requests if request.key == self._key and not request.trouble]
        for request in mine:
            if request.owner != self._mine:
                write_request(self._root, replace(request, owner=self._mine))
                self._say(f"run {request.run_id}: taken")
        self._wanted = [request.run_id for request in mine]

    def _read(self, run_id: str) -> Request | None:
        try:
            return read_request(self._root, run_id)
        except (PosttrainError, OSError) as error:
            self._say(str(error))
            return None


def main(root: Path, key: str) -> int:
    """Drive the wanted runs of this environment; return 0 when none is left."""
    given = os.environ.pop(LOCK_VARIABLE, "")
    if not given.isdecimal():
        print("error: a background driver is started by posttrain run --detach", file=sys.stderr)
        return InputError.exit_code
    lock = int(given)
    os.set_inheritable(lock, False)  # no job inherits the lock
    log = DriverLog(log_path(root, key), Veil(os.environ))
    log.take_over()
    try:
        workspace = Workspace(root)
    except PosttrainError as error:
        log.say(f"error: {error}")
        return error.exit_code
    ears = Ears(root, key, workspace.ledger.project, log.say, lambda: os.close(lock))
    driver = Driver(workspace, ears, log.say)

    def end(number: int, _: object) -> None:
        ears.stop()
        driver.end(number)

    for signalled in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signalled, end)
    log.say(f"background driver {os.getpid()} of {root}")
    ears.listen()
    ears.start()
    try:
        _tidy(workspace, key)
        driver.drive()
        if driver.told is not None:
            waiting = ", ".join(*ears.wanted().values()) or "no run"
            log.say(f"ended by {signal.Signals(driver.told).name}; waiting for a driver: {waiting}")
    finally:
        workspace.close()
        log.say("end")
    return 0


def _tidy(workspace: Workspace, key: str) -> None:
    """Remove requests of runs that have ended, and logs of former drivers."""
    root = workspace.root
    with suppress(OSError, PosttrainError), requests_held(root):
        kept = {key}
        for run_id in requested(root):
            request = read_request(root, run_id)
            if request is None:
                continue
            if not request.taken and is_final("run", workspace.ledger.run(run_id).state):
                remove_request(root, run_id)
            else:
                kept.add(request.key)
        logs = [one for one in (root / FOLDER).glob("*.log") if one.stem not in kept and not one.stem.endswith(".1")]
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[: -_LOGS or None]:
            path.unlink(missing_ok=True)
            previous(path).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
