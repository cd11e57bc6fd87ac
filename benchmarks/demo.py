"""Compares `make demo` of two checkouts, alternately: the effect of a change or a version on the whole product.

    python -m benchmarks.demo OTHER [--python PYTHON] [--rounds N] [--json FILE] [--tiny]

OTHER is the folder of another checkout of this repository, PYTHON the interpreter for it (by default that of its .venv,
or this one if it has none). A play is the command of `make demo`, with the same seed: `posttrain demo` in the
checkout's folder, with its sources first on the path and its workspace in a separate temporary folder. Jobs of version
0.1 use such sources; those of later versions accept only the installed package. Therefore this checkout must be
installed in this interpreter, and a checkout later than 0.1 needs a .venv (`make setup` there).

A round is a play of both, and the sides take turns to begin. Measured are the processor time of all processes of a play
(`benchmarks.process_tree`) and the wall time. Ratios are this checkout's over the other's, within each round; the
median and the range are reported. The bound is the other version's time. A tiny round creates a workspace and plays
nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.judging import at_most, judge
from benchmarks.versions import HERE, asked, interpreter

TARGET = 1.05  # maximum ratio of processor seconds, median
DEMO, TINY = ("demo", "--workspace"), ("init",)  # and a new folder
SHOWN = 2000  # characters of a play that failed


@dataclass(frozen=True)
class Play:
    """Seconds of one play."""

    processor: float
    wall: float


@dataclass(frozen=True)
class Result:
    """Medians in seconds of both sides, and the ratio of this checkout's to the other's."""

    time: str  # processor or wall
    here: float
    other: float
    ratio: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Side:
    """A checkout and its interpreter."""

    folder: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """Return the Makefile's variables and the checkout's sources, without any workspace or server."""
        found = {name: value for name, value in os.environ.items() if not name.startswith("POSTTRAIN_")}
        own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": ""}
        return {**found, **own, "PYTHONPATH": str(self.folder / "src")}

    def check(self) -> None:
        """Raise SystemExit if other sources would be played."""
        words = [str(self.python), "-c", "import posttrain; print(posttrain.__file__)"]
        told = subprocess.run(
            words, cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE, text=True, check=False
        ).stdout.strip()
        if not told or not Path(told).resolve().is_relative_to(self.folder.resolve() / "src"):
            raise SystemExit(f"{self.python} must take posttrain from {self.folder / 'src'}, got {told!r}")

    def play(self, words: Sequence[str]) -> Play:
        """Run one posttrain command in a new folder."""
        with tempfile.TemporaryDirectory() as name, open(Path(name) / "log.txt", "w+") as log:
            command = [sys.executable, "-m", "benchmarks.process_tree", str(self.folder)]
            command += [str(self.python), "-m", "posttrain", *words, str(Path(name) / "played")]
            done = subprocess.run(
                command, cwd=HERE, env=self.environment(), stdout=subprocess.PIPE, stderr=log, check=True
            )
            told = json.loads(done.stdout)
            if told.pop("code"):
                log.seek(0)
                raise SystemExit(f"posttrain {' '.join(words)} of {self.folder} failed:\n{log.read()[-SHOWN:]}")
        return Play(**told)


def measure(sides: Sequence[Side], words: Sequence[str], rounds: int) -> list[tuple[Play, Play]]:
    """Play both sides alternately."""
    found = []
    for turn in range(rounds):
        plays = dict[int, Play]()
        for at in (0, 1) if turn % 2 else (1, 0):
            plays[at] = play = sides[at].play(words)
            took = f"{play.processor:.1f} s of processor time, {play.wall:.1f} s of wall time"
            print(f"round {turn + 1}, {sides[at].folder}: {took}", flush=True)
        found.append((plays[0], plays[1]))
    return found


def summary(rounds: Sequence[tuple[Play, Play]]) -> list[Result]:
    """Return the results for processor and wall time."""
    results = []
    for time in ("processor", "wall"):
        own, others = ([float(getattr(play, time)) for play in plays] for plays in zip(*rounds, strict=True))
        ratios = [here / other for here, other in zip(own, others, strict=True)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        results.append(Result(time, statistics.median(own), statistics.median(others), *spread))
    return results


def main() -> None:
    """Print the table; exit 1 if this checkout takes longer than the target."""
    options = asked(
        "make demo of two checkouts in turns", 3, "one round that makes a workspace: that it runs, no figures"
    )
    if options is None:
        return
    folder = (options.other or HERE).resolve()
    sides = (Side(HERE, interpreter(HERE)), Side(folder, options.python or interpreter(folder)))
    for side in sides:
        side.check()
    words, rounds = (TINY, 1) if options.tiny else (DEMO, options.rounds)
    results = summary(measure(sides, words, rounds))
    print("time            here      other  ratio (range)")
    for r in results:
        spread = f"{r.ratio:.2f}x ({r.lowest:.2f}-{r.highest:.2f})"
        print(f"{r.time:<10} {r.here:>7.1f} s  {r.other:>7.1f} s  {spread}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    claims = [at_most(f"{r.time} time beside the other's", r.ratio, TARGET) for r in results if r.time == "processor"]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
