"""A job for executor tests: says that it started, then does what JOB_MODE says. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path) -> int:
    with (folder / "started").open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('JOB_WORD', '')}\n")
    print("a word for the log", flush=True)
    mode = os.environ["JOB_MODE"]
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child.tmp").write_text(str(child.pid))
        (folder / "child.tmp").rename(folder / "child")
    (folder / "ready").touch()
    while True:
        if (folder / "go").exists():
            return int((folder / "go").read_text())
        orders = [json.loads(path.read_bytes())["kind"] for path in (folder / "controls").glob("*.json")]
        if mode == "polite" and "stop" in orders:
            return 0
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
