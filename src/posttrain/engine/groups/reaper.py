"""The last process of a local Ray cluster, which ends the processes that the cluster's owner left running.

`python -m posttrain.engine.groups.reaper FOLDER SECONDS`

The reaper waits for the end of its standard input, whose other end only the owner has. It then kills every process
with `POSTTRAIN_RAY_CLUSTER=FOLDER` in its environment until none is left, and removes the folder. Most of Ray's own
processes die with their parent, but its agents take a minute, and Ray does not remove the folder.

A cluster is ended in the same way if its owner does not report within SECONDS that the cluster is up, because
`ray.init` waits for its workers forever, in native code that no Python thread can interrupt. Ray ends the owner when
the cluster's node ends.
"""

import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

VARIABLE = "POSTTRAIN_RAY_CLUSTER"
_LIMIT = 30.0  # seconds; a process that cannot be killed is stuck in the kernel, and waiting does not help


def main(folder: str, seconds: str) -> int:
    """Wait until the owner has ended or the start of the cluster has taken too long; then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the owner
        signal.signal(number, signal.SIG_IGN)
    if select.select([sys.stdin], [], [], float(seconds))[0]:
        sys.stdin.buffer.read()
    else:
        print(f"a local Ray cluster did not start within {seconds} seconds: {_last_words(folder)}", file=sys.stderr)
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline:
        found = list(marked(folder))
        if not found:
            break
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _last_words(folder: str) -> str:
    """Return the last line that the cluster's node wrote to its standard error."""
    lines: list[str] = []
    for log in Path(folder).glob("session_2*/logs/raylet.err"):
        with suppress(OSError):
            lines += log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no message from its node")


def marked(folder: str) -> Iterator[psutil.Process]:
    """Yield the live processes of the cluster in this folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(VARIABLE) == folder and process.status() != psutil.STATUS_ZOMBIE:
                yield process


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
