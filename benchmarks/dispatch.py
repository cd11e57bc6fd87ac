"""How evenly a batch is split over ranks, and the cost of splitting.

    python -m benchmarks.dispatch [--json FILE] [--plot FILE.png] [--draws N] [--tiny]

Imbalance is the heaviest rank's cost over the mean rank's: with 1.25 the mean rank is idle for a fifth of the step.
Response lengths are lognormal with sigma 0.99 and mean 256 tokens. The eight samples of a prompt are adjacent and
similar: half of the variance is assumed to be between prompts, so contiguous chunks are worse than items dealt in turn.
Costs are tokens, or tokens and causal attention of a model with 0.85 M parameters in 4 layers.

`pacing.balance.balance` is compared with splits into equal counts (contiguous chunks, or items dealt in turn) and with
Karmarkar-Karp differencing. The floor is a lower limit of any split, the bound a proven upper limit of ours. Each
number is the median over draws; times are CPU time of this process, best of the draws.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks.judging import Claim, at_most, judge
from posttrain.pacing.balance import TOKENS, Assignment, CostModel, balance

MEAN, SIGMA, GROUP, OF_PROMPT = 256, 0.99, 8, 0.5
BATCHES = (64, 256, 1024, 4096)
RANKS = (2, 4, 8, 16, 32, 64)
COSTS = {
    "tokens": TOKENS,
    "tokens + attention": CostModel.of_model(parameters=850_000, layers=4, attention_width=128),
}
LARGEST = 100_000  # items on 64 ranks
TARGET_SECONDS = 0.3  # maximum seconds for `LARGEST`
TARGET_ABOVE_FLOOR = 1.01  # maximum ratio to the floor with four or more items per rank

_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("equal-count chunks", {"color": "#b3432b", "marker": "s"}),
    "in_turn": ("dealt in turn", {"color": "#d9962b", "marker": "^"}),
    "bound": ("bound of ours", {"color": "#8a8f98", "linestyle": ":"}),
    "ours": ("balanced (ours)", {"color": "#4a8fd0", "marker": "o", "linewidth": 3.0, "markersize": 6}),
    "floor": ("floor of any split", {"color": "#10131a", "linestyle": "--", "linewidth": 1.2}),
}


@dataclass(frozen=True)
class Row:
    """One setting; imbalances are max/mean, medians over the draws."""

    cost: str
    batch: int
    ranks: int
    ours: float
    karmarkar_karp: float
    in_turn: float
    chunks: float
    floor: float
    bound: float
    ours_ms: float
    karmarkar_karp_ms: float


def draw_lengths(count: int, seed: int) -> list[int]:
    """Return response lengths in tokens; the samples of a prompt are adjacent."""
    rng = random.Random(seed)
    between, within = SIGMA * math.sqrt(OF_PROMPT), SIGMA * math.sqrt(1 - OF_PROMPT)
    lengths: list[int] = []
    while len(lengths) < count:
        middle = math.log(MEAN) - SIGMA**2 / 2 + rng.gauss(0, between)
        lengths += [max(1, round(rng.lognormvariate(middle, within))) for _ in range(GROUP)]
    return lengths[:count]


def karmarkar_karp(costs: Sequence[int], parts: int) -> Assignment:
    """Return the split of largest differencing: join the most uneven partial splits, heaviest part with lightest."""
    empty: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()),) * (parts - 1)
    heap = [(-cost, item, ((cost, (item,)), *empty)) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        joined = sorted(((a + b, (*x, *y)) for (a, x), (b, y) in pairs), key=lambda part: -part[0])
        least = joined[-1][0]
        split = tuple((load - least, items) for load, items in joined)
        heapq.heappush(heap, (-split[0][0], number, split))
    return Assignment.of(costs, [items for _, items in heap[0][2]])


def in_turn(costs: Sequence[int], parts: int) -> Assignment:
    """Return the split that assigns item i to part i modulo parts."""
    return Assignment.of(costs, [range(part, len(costs), parts) for part in range(parts)])


def chunks(costs: Sequence[int], parts: int) -> Assignment:
    """Return the split into contiguous chunks of equal counts."""
    edges = [part * len(costs) // parts for part in range(parts + 1)]
    return Assignment.of(costs, [range(start, end) for start, end in itertools.pairwise(edges)])


def measure(cost: str, batch: int, ranks: int, draws: int) -> Row:
    """Return one row of the report."""
    splits: dict[str, list[float]] = {name: [] for name in ("ours", "karmarkar_karp", "in_turn", "chunks")}
    seconds: dict[str, list[float]] = {"ours": [], "karmarkar_karp": []}
    floors, bounds = [], []
    for seed in range(draws):
        costs = COSTS[cost].costs(draw_lengths(batch, seed))
        for name, split in (("ours", balance), ("karmarkar_karp", karmarkar_karp)):
            assignment, taken = _timed(split, costs, ranks)
            splits[name].append(assignment.imbalance)
            seconds[name].append(taken)
        splits["in_turn"].append(in_turn(costs, ranks).imbalance)
        splits["chunks"].append(chunks(costs, ranks).imbalance)
        even = balance(costs, ranks)
        floors.append(even.floor)
        bounds.append(even.bound)
    return Row(
        cost,
        batch,
        ranks,
        **{name: statistics.median(values) for name, values in splits.items()},
        floor=statistics.median(floors),
        bound=statistics.median(bounds),
        **{f"{name}_ms": 1000 * min(values) for name, values in seconds.items()},
    )


def imbalance_report(draws: int = 9) -> list[Row]:
    """Return rows for every cost, batch size and number of ranks."""
    return [measure(cost, batch, ranks, draws) for cost in COSTS for batch in BATCHES for ranks in RANKS]


def largest_seconds() -> dict[str, float]:
    """Return the CPU seconds of `balance` for 100 000 items on 64 ranks, by cost."""
    lengths = draw_lengths(LARGEST, 0)
    return {
        name: min(_timed(balance, model.costs(lengths), RANKS[-1])[1] for _ in range(3))
        for name, model in COSTS.items()
    }


def _timed(
    split: Callable[[Sequence[int], int], Assignment], costs: Sequence[int], parts: int
) -> tuple[Assignment, float]:
    start = time.process_time()
    assignment = split(costs, parts)
    return assignment, time.process_time() - start


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot imbalance over ranks: a row of panels per cost, a column per batch size."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(COSTS), len(BATCHES), sharex=True, sharey=True, squeeze=False)
    for axes_row, cost in zip(grid, COSTS, strict=True):
        for axes, batch in zip(axes_row, BATCHES, strict=True):
            _panel(axes, [row for row in rows if (row.cost, row.batch) == (cost, batch)])
            axes.set_title(f"{batch} responses, by {cost}", fontsize=9)
        axes_row[0].set_ylabel("imbalance (max / mean)", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("ranks", fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_LOOKS), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    for name, (label, look) in _LOOKS.items():
        values = [getattr(row, name) for row in rows]
        axes.plot([row.ranks for row in rows], values, label=label, **{"linewidth": 1.6, "markersize": 4, **look})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.95, 12)
    ticks = (1, 1.5, 2, 3, 5, 10)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def claims(rows: Sequence[Row], largest: dict[str, float]) -> list[Claim]:
    """Return the claims: near the floor, not worse than the other splits or the bound, fast enough."""
    found = []
    for row in rows:
        where = f"imbalance of {row.batch} items on {row.ranks} ranks by {row.cost}"
        if row.batch >= 4 * row.ranks:
            found.append(at_most(f"{where}, over its floor,", row.ours / row.floor, TARGET_ABOVE_FLOOR))
        others = min(row.in_turn, row.chunks, row.bound)
        found.append(at_most(f"{where}, over another split's or the bound,", row.ours / others, 1 + 1e-9))
    return found + [at_most(f"{LARGEST} items by {name}", took, TARGET_SECONDS, " s") for name, took in largest.items()]


def main() -> None:
    """Print the tables; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Imbalance of dispatch beside equal counts, and its cost")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--plot", type=Path, help="also draw the imbalances into this PNG")
    parser.add_argument("--draws", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="one small batch: that it runs, no figures")
    options = parser.parse_args()
    if options.tiny:
        rows, largest = [measure(cost, 64, 4, 1) for cost in COSTS], {}
    else:
        rows, largest = imbalance_report(options.draws), largest_seconds()
    print(f"{'':28} {'-' * 15} imbalance (max / mean) {'-' * 15}   {'-- ms --':>15}")
    print(
        f"{'cost':<18} {'batch':>5} {'ranks':>5}  {'ours':>6} {'K-K':>7} {'in turn':>7} {'chunks':>7} {'floor':>7} "
        f"{'bound':>7}   {'ours':>7} {'K-K':>7}"
    )
    for r in rows:
        print(
            f"{r.cost:<18} {r.batch:>5} {r.ranks:>5} {r.ours:>7.4f} {r.karmarkar_karp:>7.4f} {r.in_turn:>7.3f} "
            f"{r.chunks:>7.3f} {r.floor:>7.4f} {r.bound:>7.3f}   {r.ours_ms:>7.2f} {r.karmarkar_karp_ms:>7.2f}"
        )
    for name, took in largest.items():
        print(f"{LARGEST} items on {RANKS[-1]} ranks by {name}: {took * 1000:.0f} ms")
    if options.json:
        found = {"imbalance": [asdict(row) for row in rows], "largest_seconds": largest}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plot:
        plot(rows, options.plot)
    judge(claims(rows, largest))  # also for a tiny round, because these counts do not depend on the machine


if __name__ == "__main__":
    main()
