"""A lost worker of a pool whose ranks work alone is replaced alone, with the same bits; any other ends the stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mortal_pools import Mortal, at_the
from test_engine_lag import APART, told
from test_engine_streaming import Even
from test_engine_training import PROMPTS, TINY, TOKENIZER, Desk

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Fact, Note
from posttrain.engine.config import DAPOConfig, GroupConfig, GRPOConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import MOST, RankContext, Recorder, WorkerLostError
from posttrain.engine.groups.worker_group import ResourcePool, WorkerGroup
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, initial_model
from posttrain.engine.recipes.dapo import DAPO
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.rollout.port import PromptBatch
from posttrain.engine.settings import PolicyGradientOptimizerConfig


class Doubling:
    """Answers an item of those that it was given with each call."""

    def __init__(self, context: RankContext) -> None:
        self.rank, self.waiting = context.rank, list[int]()

    def feed(self, items: PromptBatch) -> Iterator[tuple[int, int]]:
        self.waiting += items.keys
        if self.waiting:
            yield self.rank, self.waiting.pop(0)

    def named(self) -> tuple[int, int]:
        return self.rank, len(self.waiting)


def covers(found: tuple[int, int]) -> tuple[int, list[int], bool]:
    return found[0], [found[1]], False


def items(*keys: int) -> PromptBatch:
    return PromptBatch(tuple((key,) for key in keys), keys)


class Watched:
    """A group of two ranks that can be lost, and what is told of it."""

    def __init__(self, ranks: int = 2, **words: Any) -> None:
        self.facts: list[Fact] = []
        self.backend = Mortal(ranks, **words)
        pool = ResourcePool(self.backend, Recorder(self.facts.append))
        self.group: WorkerGroup[Doubling] = pool.start("rollout", Doubling)

    @property
    def notes(self) -> list[str]:
        return [fact.message for fact in self.facts if isinstance(fact, Note) and fact.level == "warning"]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.backend.processes]

    def fed(self, *keys: int) -> list[int]:
        feed, found = self.group.feed(covers, Doubling.feed, items(*keys)), list[int]()
        while not feed.ended:
            found += [key for _, key in feed.take(60.0)]
        return found


@pytest.mark.parametrize("number", [1, 2, 3])
def test_audit_18_a_lost_rank_is_asked_again_what_it_had_not_answered(number: int) -> None:
    desk = Watched()
    desk.backend.fate = at_the(number, "feed", 1)
    assert sorted(desk.fed(1, 2, 3, 4, 5, 6)) == [1, 2, 3, 4, 5, 6], "each once"
    first, *later = [batch.keys for _, rank, batch in desk.backend.calls if rank == 1 and batch.keys]
    assert later == [first[-len(later[0]) :]], "what it had not answered"
    assert len(later[0]) < len(first) or number < 3
    assert sum(rank == 0 and bool(batch.keys) for _, rank, batch in desk.backend.calls) == 1, "the other is not asked"
    assert desk.pids == [100, 201]
    [note] = desk.notes
    assert note.startswith("rollout rank 1 was lost: process 101 ended during feed; another takes its place")
    assert desk.fed(7, 8) == [7, 8], "nothing is left"


def test_audit_18_a_call_of_a_lost_rank_is_asked_again_and_those_of_others_are_not() -> None:
    desk = Watched()
    desk.backend.fate = at_the(1, "named", 1)
    assert desk.group.each(Doubling.named) == [(0, 0), (1, 0)]
    assert [rank for _, rank, _ in desk.backend.calls] == [0, 1, 1]
    assert desk.pids == [100, 201]


def test_audit_18_a_rank_that_is_lost_while_it_starts_is_replaced() -> None:
    facts: list[Fact] = []
    backend = Mortal(2)
    backend.fate = at_the(1, "__init__", 1)
    group: WorkerGroup[Doubling] = ResourcePool(backend, Recorder(facts.append)).start("rollout", Doubling)
    assert group.each(Doubling.named) == [(0, 0), (1, 0)]
    assert len(facts) == 1 + 1, "and a span"
    backend.fate = at_the(1, "named", 1)
    tries = iter([True, False])
    after = backend.fate
    backend.fate = lambda method, rank: next(tries) if method == "__init__" else after(method, rank)
    assert group.each(Doubling.named) == [(0, 0), (1, 0)], "lost once more, while it starts"
    assert len(facts) == 2 + 2 + 1


@pytest.mark.parametrize("method", ["feed", "__init__"])
def test_audit_18_a_rank_that_is_lost_each_time_ends_in_one_line(method: str) -> None:
    desk = Watched()
    desk.backend.fate = lambda name, rank: rank == 1 and name in ("feed", method)
    with pytest.raises(WorkerLostError) as caught:
        desk.fed(1, 2, 3, 4)
    line = str(caught.value)
    assert "\n" not in line
    assert f"ended during {method}; this rank lost {MOST + 1} processes in step 0, and at most {MOST} are" in line
    assert caught.value.process is None, "nobody tries again"
    assert len(desk.notes) == MOST
    assert len(desk.backend.broken) == 1, "the pool is given up"


def test_audit_18_replacements_are_counted_by_step() -> None:
    desk, recorder = Watched(), Recorder()
    desk.group.replacing.recorder = recorder
    for step in range(3):
        recorder.step = step
        for _ in range(MOST):
            desk.backend.fate = at_the(1, "feed", 1)
            assert desk.fed(1, 2) == [1, 2]
    assert desk.pids == [100, 101 + 100 * 3 * MOST]


def test_audit_18_a_rank_of_a_pool_that_works_together_is_not_replaced() -> None:
    desk = Watched(collective=True)
    for ask in (lambda: desk.fed(1, 2), lambda: desk.group.each(Doubling.named)):
        desk.backend.fate = lambda method, rank: rank == 1
        with pytest.raises(WorkerLostError, match="rank 1 was lost"):
            ask()
    assert not desk.notes
    assert desk.pids == [100, 101]


def test_ranks_that_share_a_shard_cannot_be_fed() -> None:
    group = ResourcePool(Mortal(2), sequence_parallel=2).start("rollout", Doubling)
    with pytest.raises(InputError, match="every rank of rollout must have its own shard, but 2 ranks share a shard"):
        group.feed(covers, Doubling.feed, items(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelSource(folder, "float32")


class Stage:
    """GRPO or DAPO whose rollout has a pool of ranks that can be lost."""

    def __init__(self, model: ModelSource, folder: Path, ranks: int, lag: int, kind: str = "grpo") -> None:
        options: dict[str, Any] = {
            "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 6, "group_size": 2, "max_new_tokens": 6,
            "placement": {**APART, "rollout": {"cpus": ranks, "ranks": ranks}}, "mini_batches": 1,
            "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2),
            **({"lag": {"steps": lag}} if lag else {}),
        }  # fmt: skip
        config: GroupConfig = DAPOConfig(**options) if kind == "dapo" else GRPOConfig(**options)
        self.facts: list[Fact] = []
        self.backend = Mortal(ranks)
        away = ResourcePool(self.backend, Recorder(self.facts.append))
        here = ResourcePool(InlineBackend(pool="policy"))
        roles = open_roles(config, model, 11, lambda role: away if role == "rollout" else here)
        made: Any = DAPO if kind == "dapo" else GRPO
        self.desk = Desk(folder, OnPolicy(config, made(config), roles, PROMPTS, Even(), 11))

    def run(self) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        self.desk.run()
        engine = "rollout/"  # what it took: more where prompts are sampled again
        metrics = [{k: v for k, v in one.items() if not k.startswith(engine)} for one in told(self.desk)]
        return self.desk.weights(), metrics

    @property
    def notes(self) -> list[str]:
        return [fact.message for fact in self.facts if isinstance(fact, Note) and fact.level == "warning"]


Plain = Callable[..., tuple[dict[str, torch.Tensor], list[dict[str, float]]]]


@pytest.fixture(scope="module")
def plain(model: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What a stage of some ranks, lag and kind that loses nobody ends with; each is run once."""

    @functools.cache
    def ends(*words: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        return Stage(model, tmp_path_factory.mktemp("plain"), *words).run()

    return ends


def same(stage: Stage, plain: tuple[dict[str, torch.Tensor], list[dict[str, float]]]) -> None:
    (weights, metrics), (others, expected) = stage.run(), plain
    assert metrics == expected
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


MOMENTS = [("feed", 1), ("feed", 3), ("feed", 9), ("view", 3), ("layout", 2), ("take", 2), ("attest", 3), ("accept", 2)]


@pytest.mark.parametrize(("method", "number"), MOMENTS)
@pytest.mark.parametrize(("ranks", "lag"), [(2, 0), (2, 1), (1, 0)])
def test_audit_18_a_stage_ends_with_the_same_bits_whoever_is_lost(
    model: ModelSource, tmp_path: Path, plain: Plain, method: str, number: int, ranks: int, lag: int
) -> None:
    stage = Stage(model, tmp_path, ranks, lag)
    lost = 0 if method in ("view", "layout") else ranks - 1  # rank 0 is asked for all
    stage.backend.fate = at_the(number, method, lost)
    same(stage, plain(ranks, lag))
    assert len(stage.notes) == 1
    assert sum(process.pid >= 200 for process in stage.backend.processes) == 1, "the others stay"


def test_audit_18_all_ranks_may_be_lost_at_once(model: ModelSource, tmp_path: Path, plain: Plain) -> None:
    stage = Stage(model, tmp_path, 3, 0, "dapo")
    seen: set[int] = set()

    def once(method: str, rank: int) -> bool:
        ends = stage.desk.controller._step == 1 and method in ("feed", "offer") and rank not in seen
        seen.update([rank] if ends else [])
        return ends

    stage.backend.fate = once
    same(stage, plain(3, 0, "dapo"))
    assert len(stage.notes) == 3


def test_audit_18_with_lag_a_lost_rank_gets_the_version_that_the_others_sample_with(
    model: ModelSource, tmp_path: Path, plain: Plain
) -> None:
    """The policy has learned since; where no other rank has its weights, nobody has."""
    for ranks in (2, 1):
        stage = Stage(model, tmp_path / f"{ranks}", ranks, 1)
        policy = stage.desk.controller.recipe.roles.made.backend
        learned: list[str] = []
        submit = policy.submit

        def watched(
            role: str, ranks: Any, method: Any, *words: Any, learned: Any = learned, submit: Any = submit
        ) -> Any:
            learned.append(method.__name__)
            return submit(role, ranks, method, *words)

        policy.submit = watched  # type: ignore[method-assign]
        ends = iter([True])
        stage.backend.fate = (
            lambda method, rank, ends=ends, learned=learned: (  # type: ignore[misc]
                method == "feed" and rank == 0 and learned[-1:] == ["update"] and next(ends, False)
            )
        )
        if ranks == 2:
            same(stage, plain(2, 1))
            assert len(stage.notes) == 1
        else:
            with pytest.raises(WorkerLostError, match=r"no process still has the weights of policy version 0\.\d"):
                stage.run()
