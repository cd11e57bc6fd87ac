"""Every benchmark, one after the other, each in a process of its own: `python -m benchmarks [--json DIR]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SUITES = ("rollout", "training", "dispatch", "controller")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="DIR", help="also write DIR/rollout.json and so on")
    folder = parser.parse_args().json
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for suite in SUITES:
        print(f"# {suite}", flush=True)
        output = ["--json", str(folder / f"{suite}.json")] if folder else []
        failed |= subprocess.run([sys.executable, "-m", f"benchmarks.{suite}", *output], check=False).returncode
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
