"""Peak memory of log-probabilities over a large vocabulary, with their gradient: in chunks against all logits at once.

    python -m benchmarks.logprobs [--json FILE] [--rounds N] [--tiny]

Both sides compute the log-probabilities of 2,048 tokens from hidden states of width 512 with a vocabulary of 151,936
tokens, sum them, and run backward. `naive` is the direct way: log_softmax of all logits, then gather; `posttrain` is
the engine's function. Each measurement is a separate process; its peak is the kernel's (`ru_maxrss`) minus the memory
in use before, including weights and hidden states. Sides are interleaved; ratios are within each round; medians are
reported. Seconds are CPU time of one thread.

The bound: the gradients of weight and hidden states, which both sides produce.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.judging import at_most, judge

VOCABULARY = 151_936
SIDES = ("naive", "posttrain")
TARGET = 0.25  # maximum share of the naive peak
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One process."""

    peak_mib: float  # beyond the memory in use before
    seconds: float
    total: float  # of the log-probabilities


@dataclass(frozen=True)
class Row:
    """Medians over rounds."""

    dtype: str
    bound_mib: float
    naive: Measured
    posttrain: Measured
    ratio: float  # of the peaks
    least: float
    most: float


def measure(side: str, dtype: str, tokens: int, hidden: int) -> Measured:
    """Forward and backward in this process."""
    import torch
    from torch import nn

    from posttrain.engine.batch import peak_memory
    from posttrain.engine.models.language_model import OutputHead
    from posttrain.engine.models.logprobs import chunked_logprobs

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    layer = nn.Linear(hidden, VOCABULARY, bias=False, dtype=kind)
    states = torch.randn(tokens, hidden, dtype=kind, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,))
    before, begin = peak_memory()["memory/peak_resident_mib"], time.process_time()
    if side == "naive":
        found = layer(states).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    else:
        found, _ = chunked_logprobs(OutputHead(layer, None), states, targets[:, None], 1.0, entropy=False)
    total = found.sum()
    total.backward()
    seconds = time.process_time() - begin
    return Measured(peak_memory()["memory/peak_resident_mib"] - before, seconds, float(total))


def elsewhere(side: str, dtype: str, tokens: int, hidden: int) -> Measured:
    """Measure in a separate process."""
    words = ["--side", side, "--dtype", dtype, "--tokens", str(tokens), "--hidden", str(hidden)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.logprobs", *words], check=True, capture_output=True)
    return Measured(**json.loads(done.stdout))


def compare(dtype: str, tokens: int, hidden: int, rounds: int) -> Row:
    """Measure both sides alternately.

    Raises:
        ValueError: their results differ.
    """
    found: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            found[side].append(elsewhere(side, dtype, tokens, hidden))
    totals = [one[0].total for one in found.values()]
    if abs(totals[0] - totals[1]) > 1e-3 * abs(totals[0]):
        raise ValueError(f"both sides must compute the same, got {totals[0]} and {totals[1]} in {dtype}")
    ratios = [one.peak_mib / other.peak_mib for other, one in zip(*found.values(), strict=True)]
    width = 2 if dtype == "bfloat16" else 4
    bound = width * hidden * (VOCABULARY + tokens) / MIB
    naive, ours = (_median(found[side]) for side in SIDES)
    return Row(dtype, bound, naive, ours, statistics.median(ratios), min(ratios), max(ratios))


def _median(found: list[Measured]) -> Measured:
    peak, seconds = (statistics.median(getattr(one, name) for one in found) for name in ("peak_mib", "seconds"))
    return Measured(peak, seconds, found[0].total)


def main() -> None:
    """Print the table; exit 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="256 tokens of width 32, once: that it runs")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(asdict(measure(options.side, options.dtype, options.tokens, options.hidden))))
        return
    tokens, hidden, rounds = (256, 32, 1) if options.tiny else (options.tokens, options.hidden, options.rounds)
    print(f"{tokens} tokens, {VOCABULARY} words, width {hidden}; target: at most {TARGET:g} of the naive peak")
    print("dtype     naive MiB  posttrain MiB  ratio (min-max)     bound MiB  naive s  posttrain s")
    rows = [compare(dtype, tokens, hidden, rounds) for dtype in ("float32", "bfloat16")]
    for row in rows:
        spread = f"{row.ratio:.2f}x ({row.least:.2f}-{row.most:.2f})"
        peaks = f"{row.naive.peak_mib:9.0f}  {row.posttrain.peak_mib:13.0f}  {spread:18}  {row.bound_mib:9.0f}"
        print(f"{row.dtype:8}  {peaks}  {row.naive.seconds:7.1f}  {row.posttrain.seconds:11.1f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    judge([at_most(f"the peak in {r.dtype}", r.ratio, TARGET) for r in rows], full=not options.tiny)


if __name__ == "__main__":
    main()
