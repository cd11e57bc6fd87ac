"""Rollout workers that take prompts on while others are in work, in this process and in real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import families
import pytest

from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.cluster import open_cluster
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.models.files import ModelSource
from posttrain.engine.rollout.port import PromptBatch, Rollouts, SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Group

OpenPool = Callable[[int], ResourcePool]
SAMPLING = SamplingParams(max_new_tokens=12, seed=7)


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.ray)])
def open_pool(request: pytest.FixtureRequest) -> Iterator[OpenPool]:
    with ExitStack() as stack:
        if request.param == "inline":
            yield lambda ranks: ResourcePool(InlineBackend(ranks))
            return
        cluster = stack.enter_context(open_cluster(cpus=4, store_bytes=200_000_000))

        def opened(ranks: int) -> ResourcePool:
            backend = cluster.backend("rollout", ranks, cpus=1, start_seconds=300, collective_seconds=300)
            return stack.enter_context(ResourcePool(backend))

        yield opened


def covers(found: Rollouts) -> tuple[int, list[int], bool]:
    return found.provenance.rank, [group.key for group in found.groups], found.idle


def prompts(*keys: int) -> PromptBatch:
    return PromptBatch(tuple((5, 9, 3 + key) for key in keys), keys)


def said(groups: dict[int, Group]) -> dict[int, list[list[int]]]:
    return {key: [sample.last.response.tolist() for sample in group.samples] for key, group in sorted(groups.items())}


@pytest.mark.parametrize("ranks", [1, 2])
def test_audit_18_prompts_that_join_a_call_say_what_they_say_alone(
    open_pool: OpenPool, ranks: int, tmp_path: Path
) -> None:
    families.build("qwen3").save_pretrained(tmp_path)
    rollout = open_pool(ranks).start("rollout", RolloutWorker, ModelSource(tmp_path, "float32"))
    whole = rollout.map(RolloutWorker.generate, prompts(0, 1, 2, 3, 4, 5), SAMPLING, 2)
    feed, found, added = rollout.feed(covers, RolloutWorker.feed, prompts(0, 1, 2, 3), SAMPLING, 2), {}, [4, 5]
    while not feed.ended:
        for rollouts in feed.take(60.0):
            found |= {group.key: group for group in rollouts.groups}
            if added:
                feed.add(prompts(added.pop(0)))
    assert said(found) == said({group.key: group for group in whole.groups})
    again = rollout.map(RolloutWorker.generate, prompts(6), SAMPLING, 2)
    assert len(again.groups[0]) == 2, "nothing of the fed call is left"
