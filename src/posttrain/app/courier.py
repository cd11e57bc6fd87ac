"""Delivering in a workspace without a server: a process beside whoever drives runs, started where there is a sink.

::

    driver ──starts──▶ python -m posttrain.app.courier ROOT PROJECT   seals, and lets `events.bus` deliver
       │ looks now and then whether it lives     │
       ▼ its end closes a pipe ─────────────────▶ delivers what is left, for a minute at most, and ends

It may be killed anywhere: the next one, of any driver, goes on from the cursors. What did not get through waits there.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from posttrain.access.ports import OS
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import PosttrainError
from posttrain.workspace.opened import OpenWorkspace
from posttrain.workspace.settings import VARIABLE

LOG = "sinks.log"  # in the workspace's folder
LEAVE_SECONDS = 60.0  # that it goes on after the end of whoever started it, where something is left to deliver
_MODULE = "posttrain.app.courier"
_POLL = 5.0  # seconds between two looks whether there is a sink, or whether the process lives
_STARTS = 3  # of one driver: more would be one that always dies
_LOG_BYTES = 1 << 20


class Courier:
    """The process that delivers events while this one works. Nothing here waits or raises."""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self._workspace = workspace
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._next = 0, 0.0
        self.keep()

    def keep(self) -> None:
        """Start it where there is a sink and it does not live, at most three times."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _POLL
        lives = self._process is not None and self._process.poll() is None
        if lives or self._starts >= _STARTS or self._workspace.read_only:
            return
        with suppress(PosttrainError, OSError):  # `posttrain sink ls` says what was not delivered
            if _wanted(self._workspace):
                self.close()
                self._starts += 1
                self._process = _start(self._workspace)

    def close(self) -> None:
        """Let it deliver what is left, and end; nobody waits for that."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


def announce(workspace: OpenWorkspace) -> None:
    """Have what happened a moment ago delivered, without waiting for it; where a server asked, its driver does it."""
    if workspace.ledger.auth == OS:
        Courier(workspace).close()


def _wanted(workspace: OpenWorkspace) -> bool:
    with workspace.ledger.snapshot() as now:
        return any(not sink.paused for sink in now.sinks())


def _start(workspace: OpenWorkspace) -> subprocess.Popen[bytes]:
    path = workspace.root / LOG
    with ExitStack() as held:
        again = os.O_TRUNC if path.exists() and path.stat().st_size > _LOG_BYTES else 0
        log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | again, 0o600)
        held.callback(os.close, log)
        return subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", _MODULE, str(workspace.root), workspace.ledger.project],
            stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/", start_new_session=True,
            env={**os.environ, VARIABLE: str(workspace.root)},
        )  # fmt: skip


def main(root: Path, project: str) -> int:
    """Deliver until whoever holds the other end of stdin is gone, and then what is left."""
    from posttrain.app.sinks import deliverer

    workspace = Workspace(root)
    known = deliverer(workspace.seen_by(workspace.actor, project, OS))
    until, wait, said = float("inf"), 0.0, ""
    while True:
        if until == float("inf"):
            if select.select([sys.stdin.fileno()], [], [], wait)[0]:  # nobody writes there: it was closed
                until, wait = time.monotonic() + LEAVE_SECONDS, 0.0
        else:
            time.sleep(min(wait, 0.1))
        try:
            workspace.seal(keep=False)
            wait = known.step()
            if until != float("inf") and not known.behind:
                break
        except PosttrainError as error:  # the ledger is away, or busy for long
            wait = 1.0
            if str(error) != said:
                said = str(error)
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {said}", file=sys.stderr, flush=True)
        if time.monotonic() >= until:
            break
    known.close()
    workspace.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
