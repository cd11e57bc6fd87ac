"""Runs every benchmark of speed, one after the other, each in a separate process.

    python -m benchmarks [--json DIR] [--tiny]

The levels of gates have a separate command: `python -m benchmarks.gates`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SUITES = (  # benchmark and options
    "rollout",
    "rollout --size 24m",
    "versions",
    "demo",
    "streaming",
    "training",
    "training --size 24m",
    "adapters",
    "dispatch",
    "controller",
    "logprobs",
    "per_token",
    "overlap",
    "turns",
    "meanwhile",
    "tracing",
    "weights",
    "ledger",
    "watching",
    "transitions",
    "staging",
    "starting",
    "serving",
    "answering",
)

ON_RUNS = ("ledger", "serving")  # these share a workspace of real runs, which takes minutes to create


def file_name(suite: str) -> str:
    """Return the name of the file for the figures."""
    return f"{suite.replace(' --', '-').replace(' ', '-')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="DIR", help="also write DIR/rollout.json and so on")
    parser.add_argument("--tiny", action="store_true", help="one small round each: that they run, no figures")
    options = parser.parse_args()
    folder = options.json
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as runs:
        for suite in SUITES:
            print(f"# {suite}", flush=True)
            name, *words = suite.split()
            words += ["--json", str(folder / file_name(suite))] if folder else []
            words += ["--keep", runs] if name in ON_RUNS else []
            words += ["--tiny"] if options.tiny else []
            failed |= subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], check=False).returncode != 0
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
