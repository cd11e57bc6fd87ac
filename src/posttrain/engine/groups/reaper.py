"""The last to leave a local Ray cluster: ends what its owner left behind, however the owner ended.

`python -m posttrain.engine.groups.reaper FOLDER SECONDS`

It waits for the end of its standard input, the other end of which only the owner holds. Then it kills every process
that carries `POSTTRAIN_RAY_CLUSTER=FOLDER` in its environment, until there is none, and removes the folder. Ray's own
processes mostly die with their parent by themselves; its agents take a minute, and nobody removes the folder.

A cluster whose owner does not write within SECONDS that it is up is ended in the same way: `ray.init` waits for its
workers for ever, in native code that no thread of Python interrupts. Ray ends the owner when its node is gone.
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
_LIMIT = 30.0  # seconds; a process that cannot be killed is stuck in the kernel, and waiting helps nobody


def main(folder: str, seconds: str) -> int:
    """Wait for the owner to end, or for a start that never ends; then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the owner
        signal.signal(number, signal.SIG_IGN)
    if select.select([sys.stdin], [], [], float(seconds))[0]:
        sys.stdin.buffer.read()
    else:
        print(f"a local Ray cluster must come up within {seconds} seconds, got {_last_words(folder)}", file=sys.stderr)
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
    """What the cluster's node wrote last on its standard error."""
    lines: list[str] = []
    for log in Path(folder).glob("session_2*/logs/raylet.err"):
        with suppress(OSError):
            lines += log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no word from its node")


def marked(folder: str) -> Iterator[psutil.Process]:
    """The processes of the cluster in this folder that are alive."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(VARIABLE) == folder and process.status() != psutil.STATUS_ZOMBIE:
                yield process


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
