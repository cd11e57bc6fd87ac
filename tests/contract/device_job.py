"""A job that needs devices: proves by locks of its own that nobody else has them, works, and ends. Standard library."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# how long a short job has its devices
_SPELL_SECONDS = 0.2


def main(folder: Path) -> int:
    seen, proofs = os.environ.get("CUDA_VISIBLE_DEVICES", ""), Path(os.environ["JOB_PROOFS"])
    held = []
    for name in filter(None, seen.split(",")):
        held.append(os.open(proofs / f"proof-{name}", os.O_CREAT | os.O_RDWR, 0o600))
        try:
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(proofs, f"collision {folder} {name}")
    if os.environ.get("JOB_MODE") == "straggler":  # in a session of its own, like a cluster's processes
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (folder / "child").write_text(str(child.pid))
    say(proofs, f"start {folder} {seen}")
    if os.environ.get("JOB_MODE") in ("straggler", "waits"):
        while not (folder / "go").exists():
            time.sleep(0.01)
    else:
        time.sleep(_SPELL_SECONDS)
        model = folder / "outputs" / "model"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_text("weights")
        outputs = {"model": {"path": "outputs/model", "form": "tree"}}
        word = {"status": "succeeded", "outputs": outputs, "metrics": {}, "tokens": 0, "seconds": 0.0, "failure": None}
        (folder / "result.tmp").write_text(json.dumps(word))
        (folder / "result.tmp").rename(folder / "result.json")
    say(proofs, f"end {folder} {seen}")
    return 0


def say(proofs: Path, line: str) -> None:
    with (proofs / "said").open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
