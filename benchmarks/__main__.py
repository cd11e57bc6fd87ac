"""Every benchmark of speed, one after the other, each in a process of its own.

    python -m benchmarks [--json DIR] [--tiny]

The levels of gates are no matter of speed: `python -m benchmarks.gates`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SUITES = (
    "rollout",
    "versions",
    "streaming",
    "training",
    "dispatch",
    "controller",
    "logprobs",
    "per_token",
    "overlap",
    "meanwhile",
    "tracing",
    "weights",
    "ledger",
    "transitions",
    "starting",
    "serving",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="DIR", help="also write DIR/rollout.json and so on")
    parser.add_argument("--tiny", action="store_true", help="one small round each: that they run, no figures")
    options = parser.parse_args()
    folder = options.json
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for suite in SUITES:
        print(f"# {suite}", flush=True)
        words = ["--json", str(folder / f"{suite}.json")] if folder else []
        words += ["--tiny"] if options.tiny else []
        failed |= subprocess.run([sys.executable, "-m", f"benchmarks.{suite}", *words], check=False).returncode
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
