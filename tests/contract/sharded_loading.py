"""One of two ranks that load a policy from a folder and shard it (FSDP2, gloo):
`python sharded_loading.py RANK FOLDER`.

Says what that took, in bytes, as JSON: `whole` what the model has in float32, `opened` by how much the process's own
memory grew when it was opened (file pages apart), `peak` the most that tensors took while it was sharded, `shard` what
this rank holds of it in the end.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from held_bytes import HeldBytes
from safetensors.torch import load_file

from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import InitModelConfig
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.files import ModelSource, character_tokenizer, initial_model
from posttrain.engine.roles.training import TorchEngine
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig

SIZE = InitModelConfig(hidden_size=256, intermediate_size=1024, layers=8, context_length=64)
BATCH = TokenBatch.pack([Document([5, 9, 3], [7, 8, 2]), Document([4], [6, 6])])


def write_models(folder: Path) -> None:
    """The same model in both types."""
    module = initial_model(SIZE, character_tokenizer(SIZE.characters), 0)
    module.save_pretrained(folder / "float32")
    module.bfloat16().save_pretrained(folder / "bfloat16")


def own_memory() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=400))
    found: dict[str, dict[str, int]] = {}
    context, options = RankContext("main", rank, 2, "cpu", collective=True), OptimizerConfig(warmup_steps=0)
    try:
        for dtype in ("float32", "bfloat16"):
            ModelSource(folder / dtype, dtype).open("cpu")  # what is imported and compiled once
        for dtype in ("float32", "bfloat16"):
            before = own_memory()
            model = ModelSource(folder / dtype, dtype).open("cpu")
            opened = own_memory() - before
            whole = 4 * sum(p.numel() for p in model.module.parameters())
            with HeldBytes() as held:
                engine = TorchEngine(context, model, options, RuntimeConfig(), steps=2, seed=0)
            shard = sum(s.tensor.numel() * s.tensor.element_size() for s in engine.export())
            found[dtype] = {"whole": whole, "opened": opened, "peak": held.peak, "shard": shard}
        found["frozen"] = frozen_base(context, folder)
    finally:
        dist.destroy_process_group()
    print(json.dumps(found))


def frozen_base(context: RankContext, folder: Path) -> dict[str, int]:
    """A bfloat16 base under trained norms: it stays in bfloat16, the norms learn in float32, and all of it is saved."""
    model = ModelSource(folder / "bfloat16", "bfloat16").open("cpu")
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_("norm" in name)
    options = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    engine = TorchEngine(context, model, options, RuntimeConfig(), steps=2, seed=0)
    for shard in engine.export():
        assert shard.frozen == ("norm" not in shard.name)
        assert shard.tensor.dtype == (torch.bfloat16 if shard.frozen else torch.float32), shard.name
    engine.step(BATCH.select_items([context.rank]), SupervisedObjective(Totals.of(BATCH)), step=0)
    engine.write_model(folder / "written")
    if context.rank == 0:
        written, base = (load_file(folder / name / "model.safetensors") for name in ("written", "bfloat16"))
        assert written.keys() == base.keys()
        moved = {name for name in base if not torch.equal(written[name], base[name])}
        assert moved == {name for name in base if "norm" in name}, moved
    return {}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
