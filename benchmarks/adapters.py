"""What an adapter costs and saves: decoding, peak memory of training, and bytes of a weight update.

    python -m benchmarks.adapters [--json FILE] [--rounds N] [--tiny]

The adapter has rank 16 on all linear layers of the decoder layers. Models have 1 M and 24 M parameters in float32.

- `products`: the linear products of a decoding step of 256 rows with the adapter, relative to those without. The bound
  counts multiplications, with the padded and fused matrices of the adapter.
- `step`: CPU time to decode 256 responses of 64 tokens, with an adapter, and with two versions of it in flight (half of
  the rows each), relative to the whole model.
- `memory`: the kernel's peak of a process that trains one SFT step (64 documents of 80 tokens, AdamW), minus the memory
  in use before the model is prepared for training: a copy of the weights, gradients, optimiser state and activations.
  The heap returns freed tensors to the kernel, because otherwise its fragmentation decides the peak.
- `update`: bytes that the policy sends to a rollout in another process.

Sides are interleaved; ratios are within each round; medians and ranges are reported. One thread; CPU time.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.judging import at_most, judge
from benchmarks.training import LORA, SIZES, TINY, Scale, prepared, sft_documents, sft_ours
from posttrain.engine.batch import peak_memory
from posttrain.engine.models.adapters import adapter_weights
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.sharding import canonical_parameters
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.llama_decoder import ALL, FusedLinear, fuse_weights, linear
from posttrain.engine.rollout.port import Generation, SamplingParams
from posttrain.engine.weights.stream import carried

TARGET = 1.5  # of the products, relative to those of the whole model
SIDES = ("whole", "adapter")
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A figure of the whole model, and what it is relative to it with an adapter."""

    what: str
    whole: float
    unit: str
    ratio: float
    least: float
    most: float
    bound: float | None = None


def opened(size: str, side: str) -> LanguageModel:
    """Return a model, whose adapter has an effect."""
    config = SIZES[size]
    model = prepared(
        initial_model(config, character_tokenizer(config.characters), 0), LORA if side != "whole" else None
    )
    with torch.no_grad():
        for layer in model.module.modules():
            if found := adapter_weights(layer):
                found[1].normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    return model


def compared(what: str, unit: str, sides: Sequence[Callable[[], float]], rounds: int) -> Row:
    """Measure two sides alternately."""
    found = [[side() for side in sides] for _ in range(rounds)]
    ratios = [other / one for one, other in found]
    whole = statistics.median(one for one, _ in found)
    return Row(what, whole, unit, statistics.median(ratios), min(ratios), max(ratios))


def products(size: str, rows: int, repeats: int, rounds: int) -> Row:
    """Time all linear products of a step, of the same weights with and without the adapter."""
    layers = fuse_weights(opened(size, "adapter").module).layers
    fused = [one for layer in layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    inputs = [torch.randn(rows, one.weight.shape[1]) for one in fused]

    def timed(some: Sequence[FusedLinear]) -> float:
        begin = time.process_time()
        for _ in range(repeats):
            for x, one in zip(inputs, some, strict=True):
                linear(x, one, ALL)
        return (time.process_time() - begin) / repeats * 1e3

    with torch.inference_mode():
        sides = ([replace(one, low=None) for one in fused], fused)
        found = compared(f"products {size}", "ms/step", [partial(timed, side) for side in sides], rounds)
    plain = sum(one.weight.numel() for one in fused)
    added = sum(sum(matrix.numel() for matrix in one.low.copies[0][:2]) for one in fused if one.low)
    return replace(found, bound=1 + added / plain)


def decoded(engine: NativeRollout, rows: int, tokens: int, *, versions: int) -> float:
    """Return the CPU seconds of decoding; the first half of the rows is of an older version if there are two."""
    sampling = SamplingParams(tokens, seed=1, ignore_eos=True)
    prompt = tuple(range(7, 23))
    work = [Generation(str(row), prompt, row, sampling, tokens) for row in range(rows)]
    begin, half = time.process_time(), rows // versions
    engine.submit(work[:half])
    found = engine.completed(0)
    if versions > 1:
        engine.pause()
        engine.update("", "2")
        engine.resume()
        engine.submit(work[half:])
    while len(found) < rows:
        found += engine.completed(60)
    return time.process_time() - begin


def steps(size: str, rows: int, tokens: int, rounds: int) -> list[Row]:
    """Compare decoding with an adapter, and with two versions of one, with decoding the whole model."""
    whole, adapted = (NativeRollout(opened(size, side)) for side in SIDES)
    one = partial(decoded, whole, rows, tokens, versions=1)
    own = [partial(decoded, adapted, rows, tokens, versions=count) for count in (1, 2)]
    return [
        compared(f"step {size}", "s", (one, own[0]), rounds),
        compared(f"step {size}, two versions", "s", (one, own[1]), rounds),
    ]


def trained(size: str, side: str, scale: Scale) -> float:
    """Return the peak of one training step in this process, MiB beyond the memory in use before."""
    config = SIZES[size]
    tokenizer = character_tokenizer(config.characters)
    module, documents = initial_model(config, tokenizer, 0), sft_documents(len(tokenizer), scale, 80)
    before = peak_memory()["memory/peak_resident_mib"]
    sft_ours(module, documents, scale, None if side == "whole" else LORA)
    return peak_memory()["memory/peak_resident_mib"] - before


def memory(size: str, rounds: int, *, tiny: bool) -> Row:
    """Compare the peaks, each of a separate process."""

    def elsewhere(side: str) -> float:
        words = ["--side", side, "--size", size, *(["--tiny"] if tiny else [])]
        command, returned = [sys.executable, "-m", "benchmarks.adapters", *words], {"MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, **returned})
        return float(done.stdout)

    return compared(f"memory {size}", "MiB", [partial(elsewhere, side) for side in SIDES], rounds)


def update(size: str) -> Row:
    """Compare the bytes of an update."""

    def sent(side: str) -> float:
        module = opened(size, side).module
        adapts = carried(module) is not None
        own = [one for _, one in canonical_parameters(module) if one.requires_grad or not adapts]
        return sum(one.numel() * one.element_size() for one in own) / MIB

    return compared(f"update {size}", "MiB", [partial(sent, side) for side in SIDES], 1)


def main() -> None:
    """Print the table; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="one small round: that it runs, no figures")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, default="1m", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side:
        print(trained(options.size, options.side, replace(TINY if options.tiny else Scale(), sft_steps=1)))
        return
    rounds, rows, tokens, repeats = (1, 4, 4, 1) if options.tiny else (options.rounds, 256, 64, 20)
    found: list[Row] = []
    print(f"{'figure':<24} {'whole':>9} {'unit':<8} {'adapter (min-max)':<24} bound")
    sizes = ("1m",) if options.tiny else tuple(SIZES)
    for size in sizes:  # first, because a process inherits the peak of the one that starts it
        found.append(memory(size, min(rounds, 3), tiny=options.tiny))
    for size in sizes:
        found += [products(size, rows, repeats, rounds), *steps(size, rows, tokens, rounds), update(size)]
    for row in found:
        spread = f"{row.ratio:.3f}x ({row.least:.3f}-{row.most:.3f})"
        bound = "" if row.bound is None else f"{row.bound:.3f}"
        print(f"{row.what:<24} {row.whole:>9.2f} {row.unit:<8} {spread:<24} {bound}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1), encoding="utf-8")
    claims = [at_most(row.what, row.ratio, TARGET) for row in found if row.bound is not None]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
