"""One rank of a policy, a critic and a reward model over FSDP2, with gloo on one machine:
`python sharded_roles.py RANK RANKS FOLDER`.

Every rank trains on its shard of one batch; rank 0 writes the whole weights and the metrics to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import families
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain.engine.algorithms.objectives import (
    LossParts,
    PolicyObjective,
    Predictions,
    PreferenceObjective,
    Totals,
    ValueObjective,
)
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.language_model import adopt_classifier, adopt_module, put_scalar_head
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig

STEPS = 4
SHAPES = [(5, 9), (3, 2), (11, 9), (1, 1)]  # prompt and response tokens
SHARDS = {  # of two ranks; ragged: 1 and 2 micro-batches; sequence: both compute one shard, documents cross the border
    "ragged": [[0, 3], [1, 2]],
    "empty": [[0, 1, 2, 3], []],
    "sequence": [[0, 1, 2, 3], [0, 1, 2, 3]],
}
PAIRS = {  # of the same documents in units of two
    "ragged": [[1], [0]],
    "empty": [[0, 1], []],
    "sequence": [[0, 1], [0, 1]],
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, max_grad_norm=0.05)  # clips
RUNTIME = RuntimeConfig(micro_batch_tokens=20)
RECOMPUTED = RuntimeConfig(micro_batch_tokens=20, activation_checkpointing=True)


def make_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(3, families.VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    batch = TokenBatch.pack([Document(draw(p), draw(r), [-3.0] * r) for p, r in SHAPES])
    noise = lambda: torch.randn(len(batch.tokens), generator=generator)  # noqa: E731
    return batch.with_columns(values=noise(), returns=noise(), advantages=noise())


def make_pairs() -> TokenBatch:
    return replace(make_batch(), units=(2, 2))


class BadGradient(torch.autograd.Function):
    """The value as it is, and no number for a gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("nan")


def diverge(policy: TrainWorker, mine: TokenBatch, objective: PolicyObjective, context: RankContext) -> None:
    """A mini-batch with a finite loss and a gradient that is none, on one rank only: nothing is left of it."""
    held = lambda: {**policy.engine.learner.parameters(), **policy.engine.learner.moments()}  # noqa: E731
    before = {name: value.clone() for name, value in held().items()}

    class Bad:
        needs = objective.needs

        def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
            parts = objective(micro, predicted)
            return LossParts(BadGradient.apply(parts.loss), parts.sums) if context.rank == 0 else parts

    try:
        policy.update(mine, Bad(), step=1, part=1)
    except DivergedError as error:
        assert "gradient norm nan" in str(error)  # noqa: PT017  # no pytest in here
    else:
        raise AssertionError("a gradient of NaN was applied")
    after = held()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def export(context: RankContext, folder: Path) -> None:
    """A bfloat16 model, whose shards are float32, as a stage leaves it: as computed, and in float32."""
    for saved in ("auto", "float32"):
        model = adopt_module(families.build("qwen3").bfloat16())
        runtime = RuntimeConfig.model_validate({"save_dtype": saved})
        policy = TrainWorker(context, model, OPTIMIZER, runtime, steps=STEPS, seed=0)
        policy.save_model(folder / saved)


def dropout_draws(context: RankContext) -> list[list[float]]:
    """What two steps' dropout would draw on this rank."""
    model = adopt_module(families.build("qwen3"))
    policy = TrainWorker(context, model, OPTIMIZER, RUNTIME, steps=STEPS, seed=0, dropout=True)
    drawn: list[list[float]] = []

    def forward(micro: TokenBatch) -> LossParts:
        drawn.append(torch.rand(4).tolist())
        return LossParts(policy.engine.predict(micro, {"logprobs"}).of("logprobs").sum() * 0.0, {})

    for step in (0, 0, 1):
        policy.engine.learner.step([make_batch()], make_batch().dummy(), forward, step=step)
    return drawn


def frozen(context: RankContext, mine: TokenBatch) -> dict[str, int]:
    """A sharded frozen role predicts what a whole one does, bit for bit, whatever documents the other rank has.

    Two micro-batches on one rank and one or none on the other. Returns the bytes of the weights that the rank holds.
    """
    found: dict[str, int] = {}
    for family, dtype in product(("qwen3", "llama"), (torch.float32, torch.bfloat16)):
        scalar = put_scalar_head(families.build(family)).to(dtype)
        with torch.no_grad():
            scalar.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        models = {"logprobs": adopt_module(families.build(family).to(dtype)), "scores": adopt_classifier(scalar)}
        for need, model in models.items():
            alone, parted = (
                FrozenWorker(context, model, micro_batch_tokens=20, shard=shard, temperature=0.7)
                for shard in (False, True)
            )
            for _ in range(2):
                left, right = (one.fill(mine, "now", need).column("now") for one in (alone, parted))  # type: ignore[arg-type]
                assert torch.equal(left, right), (family, need, dtype)
                assert not len(mine) or left.abs().max() > 0
            if need == "logprobs":
                left, right = alone.hold(mine, 3).held, parted.hold(mine, 3).held
                assert torch.equal(left.ids, right.ids)
                assert torch.equal(left.logprobs, right.logprobs)
            assert parted._model is not None
            held = [p.to_local() for p in parted._model.module.parameters() if isinstance(p, DTensor)]
            assert {p.dtype for p in held} == {dtype}
            size = sum(p.untyped_storage().nbytes() for p in held)
            assert parted.sleep() == parted.resident_bytes() == sum(p.numel() * p.element_size() for p in held)
            assert (parted.predicts(), parted.fallbacks()) == (alone.predicts(), alone.fallbacks())
            found[f"{family} {need} {str(dtype).removeprefix('torch.')}"] = size
    return found


def train(
    context: RankContext, family: str, mine: TokenBatch, pairs: TokenBatch
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights of policy, critic and reward model after STEPS updates each, by role/name, and the last metrics."""
    whole, runtime = make_batch(), RECOMPUTED if context.sequence_parallel > 1 else RUNTIME
    totals = Totals.of(whole)
    policy = TrainWorker(context, adopt_module(families.build(family)), OPTIMIZER, runtime, steps=STEPS, seed=0)
    scalar = adopt_classifier(put_scalar_head(families.build(family)))
    critic = TrainWorker(context, scalar, OPTIMIZER, runtime, name="critic", steps=STEPS, seed=0)
    scoring = adopt_classifier(put_scalar_head(families.build(family)))
    judge = TrainWorker(context, scoring, OPTIMIZER, runtime, name="reward_model", steps=STEPS, seed=0)
    begun = {name: tensor.clone() for name, tensor in policy.engine.learner.parameters().items()}
    first = policy.fill(mine, "now", "logprobs").column("now")
    for step in range(STEPS):
        surrogate = PolicyObjective(totals, clip_low=0.2, clip_high=0.2)
        if step == 1:
            diverge(policy, mine, surrogate, context)
        metrics = {f"policy/{k}": v for k, v in policy.update(mine, surrogate, step=step).metrics.items()}
        metrics |= {
            f"critic/{k}": v for k, v in critic.update(mine, ValueObjective(totals, 0.2), step=step).metrics.items()
        }
        preferring = PreferenceObjective(Totals.of(make_pairs()))
        metrics |= {f"judge/{k}": v for k, v in judge.update(pairs, preferring, step=step).metrics.items()}
    # frozen passes are collective as well
    assert judge.fill(pairs, "now", "scores").column("now").shape == (len(pairs),)
    assert len(policy.fill(mine, "now", "logprobs")) == len(critic.fill(mine, "now", "values")) == len(mine)
    weights = {}
    for role, worker in (("policy", policy), ("critic", critic), ("judge", judge)):
        gathered = worker.engine.learner.sharding.gathered() if context.size > 1 else worker.engine.learner.parameters()
        weights |= {f"{role}/{name}": tensor.detach().cpu().clone() for name, tensor in gathered.items()}
    policy.engine.learner.restore(begun, {})  # what the frozen pass above gathered must not outlive it
    torch.testing.assert_close(policy.fill(mine, "now", "logprobs").column("now"), first, atol=0, rtol=0)
    return weights, metrics


def main(rank: int, ranks: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=400))
    try:
        for case, shards in SHARDS.items():
            for family in ("qwen3", "llama"):  # a tied and an untied output head
                shared = 2 if case == "sequence" else 1
                context = RankContext("main", rank, ranks, "cpu", collective=True, sequence_parallel=shared)
                pairs = make_pairs().select_items(PAIRS[case][rank])
                weights, metrics = train(context, family, make_batch().select(shards[rank]), pairs)
                if family == "qwen3" and shared == 1:
                    held = frozen(context, make_batch().select(shards[rank]))
                    (folder / f"{case}-frozen-{rank}.json").write_text(json.dumps(held))
                if family == "qwen3":
                    (folder / f"{case}-dropout-{rank}.json").write_text(json.dumps(dropout_draws(context)))
                    export(context, folder / f"{case}-exported")
                if rank == 0:
                    save_file(weights, folder / f"{case}-{family}.safetensors")
                    (folder / f"{case}-{family}.json").write_text(json.dumps(metrics))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
