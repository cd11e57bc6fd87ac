"""Weights on their way between real processes: through the object store and from rank to rank, whole or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import families
import pytest
from odd_transit import flip_what_arrives, lose_what_arrives, serves

from posttrain.domain.errors import IntegrityError
from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.cluster import Cluster, open_cluster
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.publication import WeightTransport, transport
from posttrain.engine.models.files import ModelSource
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights.stream import PolicyVersion

pytestmark = pytest.mark.ray
BATCH = TokenBatch.pack([Document([5, 9, 3], [7, 8, 2]), Document([4], [6, 6])])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster(cpus=4, store_bytes=200_000_000) as opened:
        yield opened


@pytest.mark.parametrize("beside", [False, True], ids=["object store", "rank to rank"])
def test_one_flipped_bit_or_a_lost_update_is_refused(cluster: Cluster, tmp_path: Path, beside: bool) -> None:
    families.build("qwen3").save_pretrained(tmp_path)
    source, fast = ModelSource(tmp_path, "float32"), OptimizerConfig(learning_rate=5e-2, warmup_steps=0)
    with ExitStack() as stack:

        def opened(name: str, ranks: int) -> ResourcePool:
            backend = cluster.backend(name, ranks, cpus=1, start_seconds=300, collective_seconds=300)
            return stack.enter_context(ResourcePool(backend))

        home = opened("policy", 2)
        policy = home.start("policy", TrainWorker, source, fast, RuntimeConfig(), steps=9, seed=0)
        rollout: Any = (home if beside else opened("rollout", 1)).by_rank().start("rollout", RolloutWorker, source)
        way = transport(policy, rollout)

        def learn(step: int) -> None:
            policy.map(TrainWorker.update, BATCH, SupervisedObjective(Totals.of(BATCH)), step=step)

        learn(0)
        way.publish(PolicyVersion(0, 1))
        assert rollout.each(serves) == ["0.1"] * rollout.ranks
        refuses(way, rollout, flip_what_arrives, learn, 1, r"rollout rank 0 must decode")
        assert rollout.each(serves) == ["0.1"] * rollout.ranks, "it never serves what was refused"
        way.publish(PolicyVersion(0, 2))
        assert rollout.each(serves) == ["0.2"] * rollout.ranks
        skipped = r"the weights have not changed since version 0\.2: an update was skipped"
        refuses(way, rollout, lose_what_arrives, learn, 2, skipped)


def refuses(way: WeightTransport, rollout: Any, odd: Any, learn: Any, step: int, line: str) -> None:
    rollout.each(odd)
    learn(step)
    with pytest.raises(IntegrityError, match=line) as caught:
        way.publish(PolicyVersion(0, 9))
    assert "\n" not in str(caught.value)
