"""Continuous against static batching: responses of very different lengths, same weights, same work.

    python -m benchmarks.streaming [--size 1m|24m|600m] [--device cpu|cuda] [--json FILE] [--rounds N] [--tiny]

Response lengths are log-normal with p99/median = 10 (σ 0.99) and prescribed, as in `benchmarks.rollout`. Prompts also
differ in length (steps are cheaper if all rows are at the same position, as in batches of equal prompts). Three ways
with the native engine, each with at most the same number of rows at a time:

- `padded batches`: batch by batch; ended rows are computed until the last row ends, as in the field's static batching.
  It is measured by giving every row of a batch the batch's longest limit;
- `static batches`: batch by batch; ended rows are dropped and not replaced;
- `continuous`: everything is submitted together; free slots are filled from the queue.

Rounds are interleaved. Ratios are within each round: to `padded batches`, for which there is a target, and to `static
batches`. The median and the range are reported, in CPU time of this process (on CUDA, which has no target: elapsed
time). The bound is that of `benchmarks.rollout`: the useful work alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.judging import at_least, judge
from benchmarks.rollout import CPU, PROMPT, SIZES, Machine, Workload, bound_seconds, build_module
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams
from posttrain.engine.rollout.worker import generate, open_rollout

TARGET = 1.5  # minimum ratio of continuous batching to padded batches
SIGMA = 0.99  # p99 / median = exp(2.326 * 0.99) = 10


@dataclass(frozen=True)
class Result:
    """Rates in useful tokens per CPU-second, and ratios to the other ways in the same round."""

    way: str
    rows: int
    responses: int
    tokens_per_second: float
    ratio: float  # to padded batches
    lowest: float
    highest: float
    to_static: float
    lowest_to_static: float
    highest_to_static: float
    bound_tokens_per_second: float
    share_of_bound: float


def build_lengths(responses: int, median: float, longest: int) -> Workload:
    """Return prompts of 8 to 20 tokens and log-normal response lengths."""
    rng = random.Random(responses)
    prompts = [[rng.randrange(3, 512) for _ in range(rng.randrange(8, PROMPT + 1))] for _ in range(responses)]
    return Workload(1, prompts, [max(1, min(longest, int(rng.lognormvariate(0, SIGMA) * median))) for _ in prompts])


def answer(engine: RolloutEngine, work: Workload, limits: Sequence[int], rows: int, batch: int) -> None:
    """Sample all responses, `batch` at a time."""
    sampling = SamplingParams(max_new_tokens=max(limits), batch_size=rows, ignore_eos=True)
    for begin in range(0, len(limits), batch):
        part = slice(begin, begin + batch)
        found = generate(engine, work.prompts[part], samples=1, sampling=sampling, limits=list(limits[part]))
        assert [answer.generated for answer in found] == list(limits[part])


def measure(
    rows: int, responses: int, median: float, longest: int, *, rounds: int, size: str = "1m", machine: Machine = CPU
) -> list[Result]:
    """Measure interleaved rounds of the three ways."""
    torch.set_num_threads(1)
    model = adopt_module(build_module(positions=longest + 2 * PROMPT, size=size, machine=machine))
    engine, work = open_rollout(model), build_lengths(responses, median, longest)
    filled = [max(work.limits[at // rows * rows : (at // rows + 1) * rows]) for at in range(responses)]
    ways: dict[str, Callable[[], None]] = {
        "padded batches": lambda: answer(engine, work, filled, rows, rows),
        "static batches": lambda: answer(engine, work, work.limits, rows, rows),
        "continuous": lambda: answer(engine, work, work.limits, rows, responses),
    }
    if machine != CPU:
        ways["continuous"]()  # warm-up: a device compiles and records new sizes
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            times[way].append(machine.timed(run))
    bound = bound_seconds(model, work, machine)
    results = []
    for way, taken in times.items():
        rate = work.tokens / statistics.median(taken)
        spreads = (*_spread(times["padded batches"], taken), *_spread(times["static batches"], taken))
        results.append(Result(way, rows, responses, rate, *spreads, work.tokens / bound, rate * bound / work.tokens))
    return results


def _spread(base: Sequence[float], own: Sequence[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum of the rounds' ratios."""
    ratios = [there / here for there, here in zip(base, own, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    """Print the table; exit 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="Continuous against static batching on log-normal lengths")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="1m", help="parameters of the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what computes; cuda has no target")
    parser.add_argument("--tiny", action="store_true", help="one round of a few rows: that it runs, no figures")
    options = parser.parse_args()
    sizes = [(16, 128, 40.0, 800), (64, 512, 40.0, 800)]
    if options.tiny:
        sizes = [(4, 8, 4.0, 40)]
    rounds, machine = 1 if options.tiny else options.rounds, Machine(options.device)
    head = f"{'rows':>4} {'responses':>9}  {'way':<15} {'tokens/s':>8}"
    print(f"{head}  {'to padded (min-max)':<20} {'to static (min-max)':<20} {'bound':>8} {'reached':>8}")
    results = []
    for given in sizes:
        for r in measure(*given, rounds=rounds, size=options.size, machine=machine):
            spread = f"{r.ratio:.2f}x ({r.lowest:.2f}-{r.highest:.2f})"
            beside = f"{r.to_static:.2f}x ({r.lowest_to_static:.2f}-{r.highest_to_static:.2f})"
            print(
                f"{r.rows:>4} {r.responses:>9}  {r.way:<15} {r.tokens_per_second:>8.0f}  {spread:<20} {beside:<20} "
                f"{r.bound_tokens_per_second:>8.0f} {r.share_of_bound:>8.0%}",
                flush=True,
            )
            results.append(r)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    judged = [r for r in results if r.way == "continuous" and machine == CPU]
    claims = [at_least(f"{r.way} at {r.rows} rows, to padded batches,", r.ratio, TARGET) for r in judged]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
