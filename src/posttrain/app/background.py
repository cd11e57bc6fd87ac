"""`python -m posttrain.app.background WORKSPACE KEY`: the process that drives runs which nobody waits for.

Loops and who unblocks whom::

    detach ──writes──▶ drivers/runs/RUN.json ──▶ Ears (a thread): takes the requests of this environment, and says so
                                                   │ the runs that are wanted
                                                   ▼
    main thread: a pass over each run that is worth one, one after the other; pauses; ends when no request is left

It may be killed at any line: requests and ledger say what is to be done, the jobs go on, and whoever drives next (a
command in the foreground, or the next background driver of this environment) goes on from there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from posttrain.app.courier import Courier
from posttrain.app.runs import JUDGING, REPORTING, load_ahead
from posttrain.app.workspace import Workspace
from posttrain.control.owners import process_name
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord
from posttrain.drivers.detaching import LOCK_VARIABLE
from posttrain.drivers.log import DriverLog, Veil, previous
from posttrain.drivers.requests import (
    FOLDER,
    Request,
    fingerprint,
    log_path,
    read_request,
    remove_request,
    requested,
    requests_held,
    runs_folder,
    write_request,
)
from posttrain.trackers.following import Scribe
from posttrain.workspace.opened import OpenWorkspace

_LISTEN = 0.1  # seconds between two looks for requests
_PAUSE, _LONG_PAUSE = 0.1, 1.0  # seconds between passes that change nothing: twice as long each time
_SHARE = 8.0  # times as long as a pass took it rests
_MOST_PAUSE = 1.5  # seconds; what jobs report is looked at in between
_TRACKERS = 1.0  # seconds between two looks at who writes the trackers
_BACKOFF = (0.5, 2.0, 8.0, 30.0, 60.0)  # seconds before a run that raised is looked at again
_PATIENCE = 3600.0  # seconds of trouble with a run before it is given up
_UNEXPECTED = 5  # times that a bug may be tried again
_LOGS = 8  # logs of drivers that are kept


class Ears(threading.Thread):
    """Takes requests while the main thread is busy with a run: whoever asked waits for the answer."""

    def __init__(self, root: Path, key: str, say: Callable[[str], None]) -> None:
        super().__init__(name="ears", daemon=True)
        self._root, self._key, self._say = root, key, say
        self._mine = process_name()
        self._lock = threading.Lock()
        self._wanted: dict[str, None] = {}
        self._seen: object = None
        self._deaf = False
        self._said = ""

    def run(self) -> None:
        """Listen until the process ends."""
        while True:
            self.listen()
            time.sleep(_LISTEN)

    def listen(self) -> None:
        """Take what is new, forget what was withdrawn."""
        try:
            state = fingerprint(self._root)
            if state != self._seen and not self._deaf:
                if self.homeless:
                    self._take()
                else:
                    with requests_held(self._root):
                        self._take()
                self._seen = state  # what was written since is another one, and looked at the next time
                crashpoint("driver.after_taken")
        except (PosttrainError, OSError) as error:  # a full disk; a file that went between two looks
            if self._said != str(error):
                self._said = str(error)
                self._say(f"requests cannot be read: {error}")

    @property
    def homeless(self) -> bool:
        """Whether the workspace was removed, or moved: nothing is wanted there any more."""
        return not runs_folder(self._root).is_dir()

    def wanted(self) -> list[str]:
        """The runs to drive, in the order in which they came."""
        with self._lock:
            return list(self._wanted)

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Be done with a run, if it is over still: somebody may have let it go on meanwhile."""
        with requests_held(self._root):
            if over():
                self._forget(run_id)

    def give_up(self, run_id: str, trouble: str) -> None:
        """Leave a run to a person; the request tells why."""
        with requests_held(self._root):
            request = read_request(self._root, run_id)
            if request is not None and request.owner == self._mine:
                write_request(self._root, replace(request, owner="", trouble=trouble))
            with self._lock:
                self._wanted.pop(run_id, None)

    def stop(self) -> None:
        """Take nothing any more."""
        self._deaf = True

    def close(self, let_go: Callable[[], None]) -> bool:
        """End, if nothing is wanted; whoever asks from then on starts another driver."""
        if self.homeless:
            let_go()
            return True
        with requests_held(self._root):
            self._take()
            if self.wanted():
                return False
            let_go()
            return True

    def _take(self) -> None:
        requests = [request for request in map(self._read, requested(self._root)) if request is not None]
        mine = [request for request in requests if request.key == self._key and not request.trouble]
        for request in mine:
            if request.owner != self._mine:
                write_request(self._root, replace(request, owner=self._mine))
                self._say(f"run {request.run_id}: taken")
        with self._lock:
            self._wanted = {request.run_id: None for request in mine}

    def _read(self, run_id: str) -> Request | None:
        try:
            return read_request(self._root, run_id)
        except (PosttrainError, OSError) as error:
            self._say(str(error))
            return None

    def _forget(self, run_id: str) -> None:
        request = self._read(run_id)
        if request is not None and request.key == self._key:
            remove_request(self._root, run_id)
        with self._lock:
            self._wanted.pop(run_id, None)


@dataclass(slots=True)
class _Known:
    """What this driver knows of one run."""

    scribe: Scribe
    said: dict[str, str] = field(default_factory=dict)  # run and stages → state last told
    troubled_since: float | None = None
    tries: int = 0
    again_at: float = 0.0
    trouble: str = ""


class Wanted(Protocol):
    """Tells which runs are to be driven."""

    def wanted(self) -> list[str]:
        """The runs to drive, in the order in which they came."""

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Be done with a run, if it is over still."""

    def give_up(self, run_id: str, trouble: str) -> None:
        """Leave a run to a person."""

    def stop(self) -> None:
        """Take nothing any more."""

    def close(self, let_go: Callable[[], None]) -> bool:
        """End, if nothing is wanted."""


class Background:
    """Drives every run that is wanted, one pass after the other, until none is or somebody tells it to end."""

    def __init__(self, workspace: OpenWorkspace, ears: Wanted, log: DriverLog) -> None:
        self._workspace, self._ears, self._log, self._say = workspace, ears, log, log.say
        self._known: dict[str, _Known] = {}
        self._told: int | None = None
        self._kept = 0.0  # when trackers were looked at
        self._courier: Courier | None = None

    def end(self, number: int, _: object = None) -> None:
        """End after this pass, for a signal."""
        self._told = number

    def drive(self, let_go: Callable[[], None]) -> None:
        """Until no run is left; `let_go` lets the next driver come."""
        pause = _PAUSE
        self._courier = courier = Courier(self._workspace)
        while self._told is None:
            started = time.monotonic()
            courier.keep()
            changed = self.pass_over()
            if not self._ears.wanted() and self._closed(let_go):
                return
            pause = _PAUSE if changed else min(2 * pause, _LONG_PAUSE)
            if not changed:
                self._rest(min(max(pause, _SHARE * (time.monotonic() - started)), _MOST_PAUSE))
        self._ears.stop()
        waiting = self._ears.wanted()
        self._say(f"ended by {signal.Signals(self._told).name}; waiting for a driver: {', '.join(waiting) or 'no run'}")

    def pass_over(self) -> bool:
        """One pass over each run that is wanted and worth one; whether anything changed."""
        changed, wanted = False, self._ears.wanted()
        self._drop(self._known.keys() - set(wanted))
        for run_id in self._workspace.reconciler.worth(wanted):
            changed = self._look(run_id) or changed
            if self._told is not None:
                break
        if time.monotonic() - self._kept >= _TRACKERS:
            self._kept = time.monotonic()
            for known in self._known.values():
                known.scribe.keep()
        return changed

    def leave(self) -> None:
        """Give the leases back, so that the next driver need not wait."""
        self._drop(set(self._known))
        with suppress(PosttrainError):
            self._workspace.seal()
        if self._courier is not None:
            self._courier.close()

    def _drop(self, run_ids: Iterable[str]) -> None:
        """What is not wanted any more is somebody else's."""
        for run_id in run_ids:
            with suppress(PosttrainError):
                self._workspace.reconciler.release(run_id)
            del self._known[run_id]

    def _closed(self, let_go: Callable[[], None]) -> bool:
        try:
            return self._ears.close(let_go)
        except (PosttrainError, OSError) as error:
            self._say(str(error))
            return False

    def _rest(self, seconds: float) -> None:
        self._log.bound()
        until = time.monotonic() + seconds
        while self._told is None and (left := until - time.monotonic()) > 0:
            if self._workspace.reconciler.rest(min(left, _PAUSE)):
                return

    def _look(self, run_id: str) -> bool:
        """One pass over a run; whether anything changed. What it raises stops no other run."""
        known = self._known.get(run_id)
        if known is not None and time.monotonic() < known.again_at:
            return False
        try:
            known = known or self._meet(run_id)
            tick = self._workspace.reconciler.step(run_id)
            run = tick.run
            if known.troubled_since is not None:
                known.troubled_since, known.tries, known.trouble = None, 0, ""
                self._say(f"run {run_id}: goes on")
            if tick.changed or not known.said or is_final("run", run.state):
                self._tell(run, known)
            if is_final("run", run.state):
                self._finish(run_id)
                return True
            return tick.changed
        except NotFoundError as error:  # of a workspace whose ledger was put back
            self._say(f"run {run_id}: dropped: {error}")
            self._ears.done(run_id, lambda: True)
            return True
        except Exception as error:
            self._met(run_id, error)
            return False

    def _meet(self, run_id: str) -> _Known:
        workspace = self._workspace
        if any(kind_of(stage.kind).judges for stage in workspace.ledger.stages(run_id)):
            load_ahead(JUDGING)
        return self._known.setdefault(run_id, _Known(Scribe(workspace, run_id)))

    def _tell(self, run: RunRecord, known: _Known) -> None:
        states = {stage.name: str(stage.state) for stage in self._workspace.ledger.stages(run.id)}
        for name, state in ({f"stage {name}": state for name, state in states.items()} | {"": str(run.state)}).items():
            if known.said.get(name) != state:
                known.said[name] = state
                self._say(f"run {run.id}: {name + ' ' if name else ''}{state}")

    def _finish(self, run_id: str) -> None:
        """The run has ended: seal, report, let go."""
        from posttrain.views.reporting import write_report  # loaded ahead, once the first run was taken

        workspace = self._workspace
        workspace.reconciler.release(run_id)
        workspace.seal()
        try:
            self._say(f"run {run_id}: report: {write_report(workspace, run_id).report}")
        except PosttrainError as error:  # the outcome stands, whatever becomes of its picture
            self._say(f"run {run_id}: no report: {error}")
        crashpoint("driver.before_done")
        self._ears.done(run_id, lambda: is_final("run", workspace.ledger.run(run_id).state))
        self._known.pop(run_id, None)

    def _met(self, run_id: str, error: Exception) -> None:
        """Trouble with one run: told, tried again, at last left to a person."""
        now, known = time.monotonic(), self._known.get(run_id)
        if known is None:
            known = self._known[run_id] = _Known(Scribe(self._workspace, run_id))
        known.troubled_since = now if known.troubled_since is None else known.troubled_since
        known.tries += 1
        expected = isinstance(error, PosttrainError | OSError)
        line = " ".join(str(error).split()) or type(error).__name__
        line = line if isinstance(error, PosttrainError) else f"unexpected {type(error).__name__}: {line}"
        if now - known.troubled_since >= _PATIENCE or (not expected and known.tries >= _UNEXPECTED):
            self._say(f"run {run_id}: given up: {line}; posttrain attach {run_id} drives it on")
            with suppress(PosttrainError):
                self._ears.give_up(run_id, line)  # and the next pass drops it
            return
        wait = _BACKOFF[min(known.tries, len(_BACKOFF)) - 1]
        known.again_at = now + wait
        if known.trouble != line:
            known.trouble = line
            self._say(f"run {run_id}: {line}; tried again")


def main(root: Path, key: str) -> int:
    """Drive what is wanted from this environment; 0 when nothing is left."""
    given = os.environ.pop(LOCK_VARIABLE, "")
    if not given.isdecimal():
        print("error: a background driver is started by posttrain run --detach", file=sys.stderr)
        return InputError.exit_code
    lock = int(given)
    os.set_inheritable(lock, False)  # no job holds it
    log = DriverLog(log_path(root, key), Veil(os.environ))
    log.take_over()
    try:
        workspace = Workspace(root)
    except PosttrainError as error:
        log.say(f"error: {error}")
        return error.exit_code
    ears = Ears(root, key, log.say)
    background = Background(workspace, ears, log)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, background.end)
    log.say(f"background driver {os.getpid()} of {root}")
    ears.listen()
    ears.start()
    try:
        _tidy(workspace, key)
        load_ahead(REPORTING)
        with workspace.reconciler.kept():
            background.drive(lambda: os.close(lock))
    finally:
        background.leave()
        workspace.close()
        log.say("end")
    return 0


def _tidy(workspace: Workspace, key: str) -> None:
    """Remove requests of runs that have ended, and logs, of drivers that are gone."""
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
        logs = [one for one in (root / FOLDER).glob("*.log") if not {one.stem, one.stem.removesuffix(".1")} & kept]
        logs = [path for path in logs if not path.stem.endswith(".1")]
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[: -_LOGS or None]:
            path.unlink(missing_ok=True)
            previous(path).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
