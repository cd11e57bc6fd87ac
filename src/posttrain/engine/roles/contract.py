"""The guarantees of `TrainEngine`, as functions that test any engine.

They run on one rank, or on all ranks of a process group together (`context.collective` is then true)::

    bench = Bench(open_mine, RankContext(), folder)  # open_mine(context, seed) -> TrainEngine; seed decides the weights
    for held in HELD:
        held(bench)  # AssertionError names the broken guarantee
    learned(bench)  # returns whole weights; one rank and several ranks must learn the same weights, up to rounding

The model is any language model over `VOCABULARY` tokens or more, without dropout, in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from posttrain.domain.adapters import FOLDER, PREFIX, WEIGHTS
from posttrain.domain.errors import InputError, IntegrityError, PosttrainError
from posttrain.engine.algorithms.objectives import LossParts, SupervisedObjective, Totals
from posttrain.engine.batch import Document, Predictions, TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.adapters import attached
from posttrain.engine.models.sharding import Shard, canonical_parameters, put
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.port import Division, TrainEngine
from posttrain.engine.weights.stream import Attestation, attest

VOCABULARY = 61
_SHAPES = ((5, 9), (3, 2), (11, 9), (1, 1), (2, 4))  # prompt and response tokens of each document
_CLOSE = 1e-5  # maximum difference of a weight or log-probability between ways to split a batch


@dataclass(frozen=True)
class Bench:
    """The test bench on one rank: a function that opens an engine, the rank's context, and a folder."""

    open: Callable[[RankContext, int], TrainEngine]
    context: RankContext
    folder: Path  # visible to all ranks

    def engine(self, seed: int = 0) -> TrainEngine:
        """Return a new engine."""
        return self.open(self.context, seed)

    def shard(self) -> TokenBatch:
        """Return this rank's documents: every n-th for n ranks, so that ranks have different numbers of documents."""
        batch = whole_batch()
        return batch.select_items(range(self.context.rank, len(batch), self.context.size))

    def everyone(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks. Collective."""
        if self.context.size == 1:
            return [mine]
        found: list[Any] = [None] * self.context.size
        dist.all_gather_object(found, mine)
        return found

    def weights(self, engine: TrainEngine) -> dict[str, Tensor]:
        """Return the whole weights, assembled from every rank's export. Collective."""
        mine = [Shard(s.name, s.shape, s.tensor.detach().cpu().clone(), s.row, s.column) for s in engine.export()]
        shards = [shard for held in self.everyone(mine) for shard in held]
        found = {shard.name: torch.zeros(shard.shape, dtype=shard.tensor.dtype) for shard in shards}
        for shard in shards:
            put(found, shard)
        return found

    def train(self, engine: TrainEngine, steps: range, mine: TokenBatch | None = None) -> dict[str, float]:
        """Train and return the metrics of the last step. Collective."""
        objective = SupervisedObjective(Totals.of(whole_batch()))
        metrics: dict[str, float] = {}
        for step in steps:
            metrics = dict(engine.step(self.shard() if mine is None else mine, objective, step=step).metrics)
        return metrics


def whole_batch() -> TokenBatch:
    """Return documents of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in torch.randint(3, VOCABULARY, (count,), generator=generator))

    return TokenBatch.pack([Document(drawn(p), drawn(r)) for p, r in _SHAPES])


def predicts_in_the_order_of_the_batch(bench: Bench) -> None:
    """For any micro-batches, each document gets the same predictions as by itself; the weights do not change."""
    engine, batch = bench.engine(), whole_batch()
    before = bench.weights(engine)
    found = engine.forward(batch, {"logprobs"}).of("logprobs")
    _require(found.shape == batch.tokens.shape, "a log-probability for every token")
    _require(bool((found[~batch.response_mask] == 0).all()), "0 outside the response")
    start = 0
    for item, length in enumerate(batch.lengths):
        alone = engine.forward(batch.select_items([item]), {"logprobs"}).of("logprobs")
        same = torch.allclose(found[start : start + length], alone, atol=_CLOSE, rtol=0)
        _require(same, f"document {item} gets the same predictions as by itself")
        start += length
    some = batch.select_items([] if bench.context.rank else [0])
    count = len(engine.forward(some, {"logprobs"}).of("logprobs"))
    _require(count == sum(some.lengths), "an empty shard takes part and answers nothing")
    _require(_equal(bench.weights(engine), before), "a forward pass changes no weight")


def refuses_what_it_cannot_predict(bench: Bench) -> None:
    """A language model predicts no scores."""
    engine = bench.engine()
    _refused(InputError, lambda: engine.forward(whole_batch(), {"scores"}), "scores of a language model")


def exports_every_element_once(bench: Bench) -> None:
    """Hashes of the ranks' pieces add up to the hash of the whole: a duplicate or missing element changes the sum.

    This is also tested after a forward pass, which may leave parameters gathered.
    """
    engine = bench.engine()
    bench.train(engine, range(1))
    engine.forward(bench.shard(), {"logprobs"})
    added = Attestation()
    for found in bench.everyone(attest(engine.export())):
        added = added + found
    whole = bench.weights(engine)
    same = added == attest(Shard(name, tuple(value.shape), value) for name, value in whole.items())
    _require(same, "every element is exported by exactly one rank")
    names = {name for name, _ in canonical_parameters(engine.model.module)}
    _require(whole.keys() == names, "exported under the names of the Hugging Face module, tied tensors once")
    engine.write_model(bench.folder / "exported")
    if bench.context.rank == 0:
        adapts = attached(engine.model.module) is not None
        written = load_file(bench.folder / "exported" / (f"{FOLDER}/{WEIGHTS}" if adapts else "model.safetensors"))
        if adapts:
            written = {name.removeprefix(PREFIX): tensor for name, tensor in written.items()}
            names = {shard.name for shard in engine.export() if not shard.frozen}
            whole = {name: tensor for name, tensor in whole.items() if name in names}
        _require(names <= written.keys(), "every tensor of a model is written")
        _require(
            _equal({name: written[name] for name in whole}, whole), "the written weights equal the exported weights"
        )


def lets_a_rank_be_idle(bench: Bench) -> None:
    """With all documents on rank 0 and none on other ranks, the update is the same."""
    spread, idle = bench.engine(), bench.engine()
    lopsided = whole_batch().select_items([] if bench.context.rank else range(len(_SHAPES)))
    one, two = bench.train(spread, range(2)), bench.train(idle, range(2), lopsided)
    _require(one.keys() == two.keys(), "metrics have the same names")
    _require(
        all(abs(one[n] - two[n]) <= 1e-4 * max(1.0, abs(one[n])) for n in one),
        "metrics are those of the whole mini-batch",
    )
    _require(
        _close(bench.weights(spread), bench.weights(idle)),
        "an update does not depend on the sharding",
    )


def leaves_nothing_of_a_diverged_step(bench: Bench) -> None:
    """A loss of NaN on one rank changes nothing on any rank: no weight, no moment, no gradient."""
    engine, other = bench.engine(), bench.engine()
    for opened in (engine, other):
        bench.train(opened, range(1))
    before = bench.weights(engine)
    plain = SupervisedObjective(Totals.of(whole_batch()))

    class Bad:
        needs, denominators = plain.needs, plain.denominators

        def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
            parts = plain(micro, predicted)
            return LossParts(parts.loss * float("nan"), parts.sums) if bench.context.rank == 0 else parts

    _refused(DivergedError, lambda: engine.step(bench.shard(), Bad(), step=1), "a step whose loss is NaN")
    _require(_equal(bench.weights(engine), before), "a diverged step changes no weight")
    for opened in (engine, other):
        bench.train(opened, range(1, 2))
    _require(_equal(bench.weights(engine), bench.weights(other)), "a diverged step leaves no gradient and no moment")


def sums_what_comes_in_parts(bench: Bench) -> None:
    """A mini-batch in parts, one of them empty, gives the whole mini-batch's update and metrics after the last part."""
    whole, parted = bench.engine(), bench.engine()
    one = bench.train(whole, range(1))
    mine, before = bench.shard(), bench.weights(parted)
    total = Totals.of(whole_batch())
    sums = SupervisedObjective(Totals(1, 1, 1, 1))
    half = len(mine) // 2
    parted.step(mine, sums, step=0, part=0, more=True)  # abandoned, because a new mini-batch begins
    for number, part in enumerate((range(half), range(0), range(half, len(mine)))):
        parted.step(mine.select_items(part), sums, step=0, part=number, more=True)
    _require(_equal(bench.weights(parted), before), "an incomplete update changes no weight")
    division = Division(total.tokens, total.computed)
    two = dict(parted.step(mine.select_items([]), sums, step=0, divide=division).metrics)
    _require(one.keys() == two.keys(), "metrics have the same names")
    _require(
        all(abs(one[n] - two[n]) <= 1e-4 * max(1.0, abs(one[n])) for n in one),
        "metrics are those of the whole mini-batch",
    )
    _require(_close(bench.weights(whole), bench.weights(parted)), "parts add up to the whole's update")
    for engine in (whole, parted):
        bench.train(engine, range(1, 2))
    _require(_close(bench.weights(whole), bench.weights(parted)), "the parts do not affect the next update")


def goes_on_from_a_checkpoint(bench: Bench) -> None:
    """A resumed engine is bit-identical; a checkpoint without the role is rejected."""
    folder = bench.folder / f"checkpoint-{bench.context.size}"
    folder.mkdir(exist_ok=True)
    undisturbed, first = bench.engine(), bench.engine()
    bench.train(undisturbed, range(3))
    bench.train(first, range(2))
    written = first.save(folder, "policy")
    _require(bool(written) and all((folder / name).is_file() for name in written), "save names the files it wrote")
    bench.everyone(None)  # wait until all ranks have written
    second = bench.engine(seed=1)
    _require(not _equal(bench.weights(second), bench.weights(first)), "another seed gives other weights")
    second.restore(folder, "policy")
    _require(_equal(bench.weights(second), bench.weights(first)), "restore returns the saved weights")
    bench.train(second, range(2, 3))
    _require(_equal(bench.weights(second), bench.weights(undisturbed)), "resumed equals undisturbed")
    _refused(IntegrityError, lambda: second.restore(folder, "critic"), "a checkpoint without the role")


def records_what_the_step_found(bench: Bench) -> None:
    """With `record`, the returned batch has the log-probabilities before the update."""
    engine, mine = bench.engine(), bench.shard()
    found = engine.forward(mine, {"logprobs"}).of("logprobs")
    done = engine.step(mine, SupervisedObjective(Totals.of(whole_batch())), step=0, record=True)
    _require(done.batch is not None and torch.equal(done.batch.tokens, mine.tokens), "the batch comes back")
    recorded = done.batch.column("current_logprobs") if done.batch else found[:0]
    _require(
        torch.allclose(recorded, found, atol=_CLOSE, rtol=0), "the recorded log-probabilities are those before the step"
    )


HELD: tuple[Callable[[Bench], None], ...] = (
    predicts_in_the_order_of_the_batch,
    refuses_what_it_cannot_predict,
    exports_every_element_once,
    lets_a_rank_be_idle,
    leaves_nothing_of_a_diverged_step,
    goes_on_from_a_checkpoint,
    records_what_the_step_found,
    sums_what_comes_in_parts,
)


def learned(bench: Bench) -> dict[str, Tensor]:
    """Return whole weights after three steps. Collective."""
    engine = bench.engine()
    bench.train(engine, range(3))
    return bench.weights(engine)


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise AssertionError(f"a training engine must keep this promise, and did not: {promise}")


def _refused(kind: type[PosttrainError], act: Callable[[], object], what: str) -> None:
    try:
        act()
    except kind:
        return
    raise AssertionError(f"a training engine must refuse {what} with {kind.__name__}, and did not")


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    same = left.keys() == right.keys()
    return same and all(torch.allclose(left[name], right[name], atol=_CLOSE, rtol=0) for name in left)
