"""Compares the rollout of two checkouts, alternately: the effect of a change or a version.

    python -m benchmarks.versions OTHER [--python PYTHON] [--rounds N] [--json FILE] [--tiny]

OTHER is the folder of another checkout of this repository, PYTHON its environment's interpreter (by default
OTHER/.venv/bin/python, or this one if it does not exist). Each side is a separate process, which generates the batches
of `benchmarks.rollout` from its checkout. The sides alternate, and take turns to begin. The ratio of useful tokens per
CPU-second is within each turn; median, quartiles and range are reported. The memory layout of a process changes its
figures by some percent, so both processes are restarted after every few turns. Figures of different runs of this
benchmark are not comparable, because machines vary more between hours than versions do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from benchmarks.judging import at_least, judge

HERE = Path(__file__).resolve().parents[1]
TARGET = 0.95  # minimum ratio to the other's rate, median; ADR 0057 accepts less at 16 rows
BATCHES = ((256, 1), (256, 8), (16, 1), (16, 8))  # rows, samples of each prompt
_TURNS = 8  # per process
_PER_TURN = 256  # minimum rows per turn
# The code of a side; it uses only names that every version's benchmark has.
_SIDE = """
import sys, time
sys.path[:0] = [sys.argv[1] + "/src", sys.argv[1]]
import torch
from benchmarks.rollout import adopt_module, build_module, build_workload, open_rollout, run_engine

torch.set_num_threads(1)
engine, works = open_rollout(adopt_module(build_module())), {}
print("ready", flush=True)
for line in sys.stdin:
    rows, group, times = map(int, line.split())
    if (rows, group) not in works:
        works[rows, group] = build_workload(rows, group)
        run_engine(engine, works[rows, group])
    begin = time.process_time()
    for _ in range(times):
        run_engine(engine, works[rows, group])
    print(works[rows, group].tokens * times / (time.process_time() - begin), flush=True)
"""


@dataclass(frozen=True)
class Result:
    """Useful tokens per CPU-second of both sides, and the ratio of this checkout's to the other's."""

    rows: int
    group: int
    here: float
    other: float
    ratio: float
    lower: float  # quartile
    upper: float
    lowest: float
    highest: float


@final
class Side:
    """The process of one checkout."""

    def __init__(self, folder: Path, python: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [str(python), "-c", _SIDE, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._answer()

    def rate(self, rows: int, group: int, times: int) -> float:
        """Return useful tokens per CPU-second over a number of batches."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows} {group} {times}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side must answer, got exit code {self._process.wait()}; its error stands above")
        return line


def interpreter(folder: Path) -> Path:
    """Return the interpreter for a checkout: its environment's Python if it has one; this one for this checkout."""
    own = folder / ".venv" / "bin" / "python"
    return own if folder != HERE and own.exists() else Path(sys.executable)


def measure(folders: Sequence[tuple[Path, Path]], batches: Sequence[tuple[int, int]], rounds: int) -> list[Result]:
    """Measure turns of both sides, each a checkout and an interpreter, on each batch."""
    turns: dict[tuple[int, int], list[tuple[float, float]]] = {batch: [] for batch in batches}
    for begin in range(0, rounds, _TURNS):
        with ExitStack() as ends:
            here, other = (ends.enter_context(closing(Side(*folder))) for folder in folders)
            for (rows, group), found in turns.items():
                times = max(1, _PER_TURN // 2 // rows) if rounds > 1 else 1
                for turn in range(begin, min(begin + _TURNS, rounds)):
                    order = (here, other) if turn % 2 else (other, here)
                    rates = {side: side.rate(rows, group, times) for side in order}
                    found.append((rates[here], rates[other]))
    return [_result(*batch, found) for batch, found in turns.items()]


def _result(rows: int, group: int, turns: Sequence[tuple[float, float]]) -> Result:
    ratios = sorted(own / others for own, others in turns)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(turns) > 1 else ratios * 3
    own, others = (statistics.median(rates) for rates in zip(*turns, strict=True))
    return Result(rows, group, own, others, middle, low, high, ratios[0], ratios[-1])


def asked(description: str, rounds: int, tiny: str) -> argparse.Namespace | None:
    """Return the arguments of a benchmark of two checkouts; None without another checkout, so nothing is compared.

    Args:
        rounds: the default number of rounds.
        tiny: help text of `--tiny`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("other", type=Path, nargs="?", help="folder of the other checkout; with --tiny this one")
    parser.add_argument("--python", type=Path, help="its interpreter; default: its .venv's, or this one")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--tiny", action="store_true", help=tiny)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {options.rounds}")
    if options.other is None and not options.tiny:  # as in `python -m benchmarks`
        print("nothing is compared: no other checkout was named; git worktree add makes one")
        if options.json:
            options.json.write_text("[]\n")
        return None
    return options


def main() -> None:
    """Print the table; exit 1 if this checkout is slower than the target."""
    options = asked("Rollout of two checkouts in turns", 60, "one round of four rows: that it runs, no figures")
    if options is None:
        return
    folder = (options.other or HERE).resolve()
    python = options.python or interpreter(folder)
    batches, rounds = (((4, 2),), 1) if options.tiny else (BATCHES, options.rounds)
    results = measure([(HERE, Path(sys.executable)), (folder, python)], batches, rounds)
    print(f"{'rows':>4} {'group':>5} {'here':>9} {'other':>9}  ratio (quartiles, range)")
    for r in results:
        spread = f"{r.ratio:.2f}x ({r.lower:.2f}-{r.upper:.2f}, {r.lowest:.2f}-{r.highest:.2f})"
        print(f"{r.rows:>4} {r.group:>5} {r.here:>9.0f} {r.other:>9.0f}  {spread}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    claims = [at_least(f"this checkout at {r.rows} rows, group {r.group},", r.ratio, TARGET) for r in results]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
