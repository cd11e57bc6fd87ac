"""A job for fork server tests: leaves what it finds around itself in `found.json`, and ends as END says."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    preload = sys.modules.get("executor_preload")
    listed = [int(name) for name in os.listdir("/proc/self/fd")]  # the listing's own is gone again
    found = {
        "server": preload.LOADED_BY if preload else None,
        "argv": sys.argv,
        "words": [w for w in Path("/proc/self/cmdline").read_bytes().decode().split("\0") if w],
        "keys": sorted(name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "PGPASS", "OTHER_"))),
        "parents_keys": any(
            key in Path(f"/proc/{os.getppid()}/environ").read_bytes() for key in (b"WANDB_", b"MLFLOW_", b"PGPASS")
        ),
        "open": sorted(number for number in listed if os.path.exists(f"/proc/self/fd/{number}")),
        "main": sys.modules["__main__"].__name__,
        "folder": os.getcwd(),
        "flags": [sys.flags.no_site, sys.flags.no_user_site, int(sys.flags.safe_path)],
        "compiled": sys.pycache_prefix,
        "collects": gc.isenabled(),  # a fork server rests its collector while it imports
    }
    (folder / "found.tmp").write_text(json.dumps(found))
    (folder / "found.tmp").rename(folder / "found.json")
    print("out", flush=True)
    end = os.environ.get("END", "0")
    if end == "raise":
        raise ValueError("as told")
    sys.exit(int(end) if end.isdigit() else end)
