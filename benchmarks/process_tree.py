"""Wall and processor seconds of a command and of everything that it starts, as one line of JSON.

    python -m benchmarks.process_tree FOLDER WORD...

The kernel adds a process to the count of whoever waits for it. Supervisors of jobs outlive who started them, so this
process asks to be given such orphans (Linux), and waits for them too: without that no training would be counted. The
command runs in FOLDER; what it prints goes to stderr.
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
    """Run it and tell; its exit code is told too, and not this process's."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit(f"orphans cannot be counted: {os.strerror(ctypes.get_errno())}")
    begin = time.monotonic()
    process = subprocess.Popen(sys.argv[2:], cwd=sys.argv[1], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    wall = 0.0
    while True:  # whoever has ended is taken away at once: a supervisor that stays in the table seems to live
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
