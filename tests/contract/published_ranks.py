"""One of two ranks with a shard of a policy (FSDP2, gloo) and, beside it, a rollout with a copy:
`python published_ranks.py RANK FOLDER`. Ends with `held`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import families
import torch
import torch.distributed as dist
from held_bytes import HeldBytes

from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.files import ModelSource
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights import stream
from posttrain.engine.weights.stream import Attestation, AttestedWeights

LIMIT = 2048
FAMILIES = ("qwen3", "llama")  # a tied and an untied output head
BATCH = TokenBatch.pack([Document([5, 9, 3], [7, 8, 2]), Document([4], [6, 6])])
FAST = OptimizerConfig(learning_rate=5e-2, warmup_steps=0)


class Pair:
    """What stands on this rank."""

    def __init__(self, context: RankContext, folder: Path, dtype: str) -> None:
        source = ModelSource(folder, dtype)
        self.policy = TrainWorker(context, source, FAST, RuntimeConfig(), steps=9, seed=0)
        self.rollout = RolloutWorker(context, source)
        assert self.rollout.view() == "neighbour"

    def size(self) -> int:
        return sum(view.numel() * view.element_size() for _, view in self.rollout._engine.attest(()).views or ())

    def learn(self, step: int) -> None:
        mine = BATCH.select_items([dist.get_rank()])
        self.policy.update(mine, SupervisedObjective(Totals.of(BATCH)), step=step)
        self.policy.fill(mine, "now", "logprobs")  # which leaves gathered parameters behind

    def published(self, *, altered: bool = False) -> tuple[Attestation, AttestedWeights, int]:
        """What the ranks' shards add up to, what this rank's copy is then, and the most bytes that it took."""
        mine, count = self.policy.attest(self.rollout.layout())
        expected, counts = Attestation(), []
        for found, many in everyone((mine, count)):
            expected, counts = expected + found, [*counts, many]
        with HeldBytes() as held:
            self.rollout.exchange(max(counts))
        if altered:
            next(iter(dict(self.rollout._engine.attest(()).views or ()).values())).view(-1)[:1].view(torch.uint8)[
                0
            ] ^= 1
        return expected, self.rollout.attest(), held.peak


def everyone(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def main(rank: int, folder: Path) -> None:
    for family in FAMILIES:  # before there is a process group: with one, only its first rank writes
        families.build(family).save_pretrained(folder / f"{family}-{rank}")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=400))
    stream.BUCKET_BYTES = LIMIT
    try:
        for family in FAMILIES:
            for dtype in ("float32", "bfloat16"):
                pair = Pair(RankContext("main", rank, 2, "cpu", collective=True), folder / f"{family}-{rank}", dtype)
                before: AttestedWeights | None = None
                for step in range(2):
                    pair.learn(step)
                    expected, attested, peak = pair.published()
                    assert attested.found == expected, attested.found.differing(expected)[:3]
                    assert len(set(map(str, everyone(attested.found)))) == 1
                    # a bucket sent, one taken, their descriptions; gloo's thread lets go of one a moment late
                    assert 0 < peak <= 3 * LIMIT + 2048 < pair.size() / 3
                    assert before is None or before.found != attested.found
                    before = attested
                expected, attested, _ = pair.published(altered=rank == 1)
                assert len(attested.found.differing(expected)) == (1 if rank == 1 else 0)
        print("held")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
