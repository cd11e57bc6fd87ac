"""What every `TrainEngine` must do, as functions: hold your own against it with

    python train_engine.py RANK RANKS FOLDER [MODULE:FUNCTION]

where FUNCTION(place, seed) -> TrainEngine opens it, over any language model with a vocabulary of `families.VOCABULARY`
and no dropout, with AdamW at `OPTIMIZER`. Every rank prints `held` when it did all of it; rank 0 writes what the ranks
learned together to FOLDER, to be compared with one rank's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import families
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.algorithms.objectives import LossParts, SupervisedObjective
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.place import Place
from posttrain.engine.models import adopt_module
from posttrain.engine.models.exported import Shard, put
from posttrain.engine.predictions import Predictions
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.port import TrainEngine
from posttrain.engine.roles.torch_engine import TorchEngine
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights.attestation import Attestation, attest

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, max_grad_norm=0.5)
SHAPES = [(5, 9), (3, 2), (11, 9), (1, 1), (2, 4)]  # prompt and response tokens
SHARDS = {1: [[0, 1, 2, 3, 4]], 2: [[0, 3], [1, 2, 4]]}  # ragged: ranks have different numbers of micro-batches
Opening = Callable[[Place, int], TrainEngine]


@dataclass(frozen=True)
class Bench:
    """An engine's surroundings on one rank."""

    open: Opening
    place: Place
    folder: Path  # that all ranks see

    def engine(self, seed: int = 0) -> TrainEngine:
        return self.open(self.place, seed)

    def shard(self) -> TokenBatch:
        return whole_batch().select_items(SHARDS[self.place.size][self.place.rank])

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank has."""
        if self.place.size == 1:
            return [mine]
        found: list[Any] = [None] * self.place.size
        dist.all_gather_object(found, mine)
        return found

    def weights(self, engine: TrainEngine) -> dict[str, Tensor]:
        """The whole weights, put together from what every rank exports."""
        mine = [Shard(s.name, s.shape, s.tensor.detach().cpu().clone(), s.row, s.column) for s in engine.export()]
        shards = [shard for held in self.everyone(mine) for shard in held]
        found = {shard.name: torch.zeros(shard.shape, dtype=shard.tensor.dtype) for shard in shards}
        for shard in shards:
            put(found, shard)
        return found

    def train(self, engine: TrainEngine, steps: range, *, empty: bool = False) -> dict[str, float]:
        whole = whole_batch()
        mine = whole.select_items([]) if empty and self.place.rank else self.shard()
        if empty and not self.place.rank:
            mine = whole
        metrics: dict[str, float] = {}
        for step in steps:
            metrics = dict(engine.step(mine, SupervisedObjective(Totals.of(whole)), step=step).metrics)
        return metrics


def whole_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(3, families.VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    return TokenBatch.pack([Document(draw(p), draw(r)) for p, r in SHAPES])


def predicts_in_the_order_of_the_batch(bench: Bench) -> None:
    """Whatever the micro-batches, each document gets what it gets alone; nothing changes."""
    engine, batch = bench.engine(), whole_batch()
    before = bench.weights(engine)
    found = engine.forward(batch, {"logprobs"}).of("logprobs")
    assert found.shape == batch.tokens.shape
    assert bool((found[~batch.response_mask] == 0).all())
    start = 0
    for item, length in enumerate(batch.lengths):
        alone = engine.forward(batch.select_items([item]), {"logprobs"}).of("logprobs")
        torch.testing.assert_close(found[start : start + length], alone, atol=1e-5, rtol=0)
        start += length
    empty = batch.select_items([] if bench.place.rank else [0])
    assert len(engine.forward(empty, {"logprobs"}).of("logprobs")) in (0, batch.lengths[0])
    assert _equal(bench.weights(engine), before)


def refuses_what_it_cannot_predict(bench: Bench) -> None:
    try:
        bench.engine().forward(whole_batch(), {"scores"})
    except InputError:
        return
    raise AssertionError("a language model was asked for scores, and answered")


def exports_every_element_once(bench: Bench) -> None:
    """Hashes of the ranks' pieces add up to the whole's, which counts what comes twice and what does not come."""
    engine = bench.engine()
    bench.train(engine, range(1))
    added = Attestation()
    for found in bench.everyone(attest(engine.export())):
        added = added + found
    whole = bench.weights(engine)
    assert added == attest(Shard(name, tuple(value.shape), value) for name, value in whole.items())
    named = dict(families.build("qwen3").named_parameters())
    assert {n: tuple(p.shape) for n, p in named.items()} == {n: tuple(p.shape) for n, p in whole.items()}


def an_idle_rank_takes_part(bench: Bench) -> None:
    """All documents on rank 0, none elsewhere: the same update."""
    ragged, idle = bench.engine(), bench.engine()
    one, two = bench.train(ragged, range(2)), bench.train(idle, range(2), empty=True)
    assert one.keys() == two.keys()
    assert all(abs(one[name] - two[name]) <= 1e-4 * max(1.0, abs(one[name])) for name in one)
    assert _close(bench.weights(ragged), bench.weights(idle))


def a_diverged_step_leaves_nothing(bench: Bench) -> None:
    engine = bench.engine()
    bench.train(engine, range(1))
    before = bench.weights(engine)
    whole = whole_batch()
    plain = SupervisedObjective(Totals.of(whole))

    class Bad:
        needs = plain.needs

        def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
            parts = plain(micro, predicted)
            return LossParts(parts.loss * float("nan"), parts.sums) if bench.place.rank == 0 else parts

    try:
        engine.step(bench.shard(), Bad(), step=1)
    except DivergedError:
        pass
    else:
        raise AssertionError("a step that is no number was taken")
    assert _equal(bench.weights(engine), before)
    other = bench.engine()
    bench.train(other, range(1))
    bench.train(engine, range(1, 2))
    bench.train(other, range(1, 2))
    assert _equal(bench.weights(engine), bench.weights(other)), "a gradient or moment was left"


def goes_on_from_a_checkpoint(bench: Bench) -> None:
    """Bit for bit; and refuses one of another model."""
    folder = bench.folder / f"checkpoint-{bench.place.size}"
    folder.mkdir(exist_ok=True)
    undisturbed, first = bench.engine(), bench.engine()
    bench.train(undisturbed, range(3))
    bench.train(first, range(2))
    written = first.save(folder, "policy")
    assert written
    assert all((folder / name).is_file() for name in written)
    bench.everyone(None)  # all have written
    second = bench.engine(seed=1)
    assert not _equal(bench.weights(second), bench.weights(first))
    second.restore(folder, "policy")
    assert _equal(bench.weights(second), bench.weights(first))
    bench.train(second, range(2, 3))
    assert _equal(bench.weights(second), bench.weights(undisturbed))
    try:
        second.restore(folder, "critic")
    except IntegrityError:
        return
    raise AssertionError("a checkpoint without the role was taken")


def writes_the_model(bench: Bench) -> None:
    engine = bench.engine()
    bench.train(engine, range(2))
    folder = bench.folder / f"model-{bench.place.size}"
    engine.write_model(folder)
    whole = bench.weights(engine)
    if bench.place.rank == 0:
        assert _equal({n: t for n, t in load_file(folder / "model.safetensors").items() if n in whole}, whole)


def records_what_the_step_found(bench: Bench) -> None:
    engine, mine = bench.engine(), bench.shard()
    found = engine.forward(mine, {"logprobs"}).of("logprobs")
    done = engine.step(mine, SupervisedObjective(Totals.of(whole_batch())), step=0, record=True)
    assert done.batch is not None
    torch.testing.assert_close(done.batch.column("proximal_logprobs"), found, atol=1e-5, rtol=0)
    assert torch.equal(done.batch.tokens, mine.tokens)


HELD = (
    predicts_in_the_order_of_the_batch,
    refuses_what_it_cannot_predict,
    exports_every_element_once,
    an_idle_rank_takes_part,
    a_diverged_step_leaves_nothing,
    goes_on_from_a_checkpoint,
    writes_the_model,
    records_what_the_step_found,
)


def learned(bench: Bench) -> dict[str, Tensor]:
    """Weights after three steps: those of any number of ranks are one rank's."""
    engine = bench.engine()
    bench.train(engine, range(3))
    return bench.weights(engine)


def open_torch(place: Place, seed: int) -> TrainEngine:
    """The engines of this repository: whole on one rank, FSDP2 on several."""
    model = adopt_module(families.build("qwen3"))
    if seed:
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(1.5)
    return TorchEngine(place, model, OPTIMIZER, RuntimeConfig(micro_batch_tokens=20), steps=4, seed=0)


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(left[n], right[n], atol=1e-5, rtol=0) for n in left)


def main(rank: int, ranks: int, folder: Path, name: str = "train_engine:open_torch") -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=400))
    try:
        module, _, function = name.partition(":")
        opening: Opening = getattr(importlib.import_module(module), function)
        bench = Bench(opening, Place("main", rank, ranks, "cpu", collective=True), folder)
        for held in HELD:
            held(bench)
        weights = learned(bench)
        if rank == 0:
            save_file(weights, folder / "learned.safetensors")
        print("held")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:5])
