"""Prints wall and processor seconds of a command and all processes that it starts, as one line of JSON.

    python -m benchmarks.process_tree FOLDER WORD...

The kernel adds the time of a process to the process that waits for it. Supervisors of jobs outlive their parents, so
this process adopts orphans (a Linux subreaper) and waits for them; otherwise no training would be counted. The command
runs in FOLDER; its output goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def main() -> None:
    """Run the command and print the result, including the command's exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit(f"orphans cannot be counted: {os.strerror(ctypes.get_errno())}")
    begin = time.monotonic()
    process = subprocess.Popen(sys.argv[2:], cwd=sys.argv[1], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    wall = 0.0
    while True:  # ended processes are reaped immediately, because an unreaped supervisor counts as alive
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        if pid == process.pid:
            wall, process.returncode = time.monotonic() - begin, os.waitstatus_to_exitcode(status)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"code": process.returncode, "processor": used.ru_utime + used.ru_stime, "wall": wall}))


if __name__ == "__main__":
    main()
