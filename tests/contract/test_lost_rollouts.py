"""Processes of a rollout pool that are killed: each is replaced alone, and the stage ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_lag import APART
from test_engine_training import PROMPTS, TINY, TOKENIZER, Desk, FixedScorer, even_tokens

from posttrain.domain.jobs import Fact, Note
from posttrain.engine.config import GRPOConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.cluster import Cluster, open_cluster
from posttrain.engine.groups.port import Recorder, WorkerLostError
from posttrain.engine.groups.worker_group import Deadlines, Future, ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, initial_model
from posttrain.engine.recipes.algorithm import PromptSource
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import Observed
from posttrain.engine.settings import PolicyGradientOptimizerConfig

pytestmark = pytest.mark.ray
Moment = Callable[["Stage"], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster(cpus=4, store_bytes=200_000_000) as opened:
        yield opened


class Talking(GRPO):  # type: ignore[misc]
    """Two responses to every prompt."""

    @property
    def source(self) -> PromptSource:
        return replace(super().source, turns=2, observed=1)


class Speaking:
    """An environment that calls `then` before every observation, until it returns true."""

    def __init__(self, then: Callable[[], bool] = lambda: True) -> None:
        self.then, self.done = then, False

    def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
        self.done = self.done or self.then()
        seen = (7 + sample.generated % 5,)
        return Future(lambda: seen, lambda: True)

    def wait(self, seconds: float) -> None:
        """Every observation has ended."""


class Stage:
    """GRPO with two rollout processes, or without a cluster two ranks in this process, over a policy in this one."""

    def __init__(self, cluster: Cluster | None, folder: Path, lag: int = 0, environment: Any = None) -> None:
        initial_model(TINY, TOKENIZER, 0).save_pretrained(folder / "model")
        TOKENIZER.save_pretrained(folder / "model")
        config = GRPOConfig(
            data="d", reward="r", steps=3, prompts_per_step=6, group_size=2, mini_batches=1,
            max_new_tokens=20 if environment else 6,
            placement={**APART, "rollout": {"cpus": 2, "ranks": 2}}, lag={"steps": lag} if lag else None,
            optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2),
        )  # fmt: skip
        self.facts: list[Fact] = []
        self.backend: Any = InlineBackend(2, pool="rollout")
        if cluster:
            self.backend = cluster.backend("rollout", 2, cpus=1, start_seconds=500, collective=False)
        self.pool = ResourcePool(self.backend, Recorder(self.facts.append), deadlines=Deadlines(start=500))
        here = ResourcePool(InlineBackend(pool="policy"))
        source = ModelSource(folder / "model", "float32")
        roles = open_roles(config, source, 11, lambda role: self.pool if role == "rollout" else here)
        algorithm = Talking(config) if environment else GRPO(config)
        words: Any = config, algorithm, roles, PROMPTS, FixedScorer(even_tokens), 11
        self.recipe = OnPolicy(*words, environment=environment)
        self.desk = Desk(folder, self.recipe)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.backend.processes]

    @property
    def notes(self) -> list[str]:
        return [fact.message for fact in self.facts if isinstance(fact, Note)]

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def run(self) -> dict[str, torch.Tensor]:
        with self.pool:
            self.desk.run()
        return self.desk.weights()


def once(call: Callable[..., Any], then: Callable[[Any], bool]) -> Callable[..., Any]:
    """The call, and after it something else, until that says that it was done."""
    done = False

    def called(*words: Any) -> Any:
        nonlocal done
        found = call(*words)
        done = done or then(found)
        return found

    return called


def in_the_middle_of_a_step(stage: Stage) -> None:
    """When the second step's first answer is there."""

    def killed(found: Any) -> bool:
        if found and stage.desk.controller._step == 1:
            stage.kill(1)
        return bool(found) and stage.desk.controller._step == 1

    stage.backend.take = once(stage.backend.take, killed)


def between_steps(stage: Stage) -> None:
    """Before the weights of the first step are published."""
    publish = stage.recipe.publish_weights

    def published(version: Any) -> None:
        if version.step == 1:
            stage.kill(0)
        publish(version)

    stage.recipe.publish_weights = published  # type: ignore[method-assign]


def while_it_is_launched(stage: Stage) -> None:
    """The one that is killed in the middle of a step, and the one that takes its place before its worker is there."""
    in_the_middle_of_a_step(stage)
    construct, killed = stage.backend._construct, list[int]()

    def constructed(*words: Any) -> None:
        if not killed:
            killed.append(stage.pids[1])
            stage.kill(1)
        construct(*words)

    stage.backend._construct = constructed


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_killed_between_two_turns_is_replaced_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, lag: int, rank: int
) -> None:
    """Its samples are sampled again from their first turn, and observed again."""
    plain = Stage(None, tmp_path / "plain", lag, Speaking()).run()
    environment = Speaking()
    stage = Stage(cluster, tmp_path / "killed", lag, environment)
    before = list(stage.pids)

    def killed() -> bool:
        there = stage.desk.controller._step == 1
        if there:
            stage.kill(rank)
        return there

    environment.then = killed
    found = stage.run()
    assert all(torch.equal(value, found[name]) for name, value in plain.items())
    assert sum(then != now for then, now in zip(before, stage.pids, strict=True)) == 1


@pytest.mark.parametrize(
    ("moment", "lag", "lost", "replaced"),
    [
        (in_the_middle_of_a_step, 0, 1, 1),
        (in_the_middle_of_a_step, 1, 1, 1),
        (between_steps, 0, 0, 1),
        (while_it_is_launched, 0, 1, 2),
    ],
)
def test_audit_18_a_killed_rollout_process_is_replaced_alone_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, moment: Moment, lag: int, lost: int, replaced: int
) -> None:
    plain = Stage(None, tmp_path / "plain", lag).run()
    stage = Stage(cluster, tmp_path / "killed", lag)
    before = stage.pids
    moment(stage)
    weights = stage.run()
    assert all(torch.equal(value, plain[name]) for name, value in weights.items())
    assert stage.pids[lost] != before[lost]
    assert stage.pids[1 - lost] == before[1 - lost], "the other keeps its process"
    assert len(stage.notes) == replaced
    assert f"rollout rank {lost} was lost: process {before[lost]} on " in stage.notes[0]


def test_audit_18_a_rollout_process_that_is_killed_each_time_ends_the_stage_in_one_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    stage = Stage(cluster, tmp_path)
    take, killed = stage.backend.take, set[int]()

    def taken(*words: Any) -> Any:
        if stage.pids[1] not in killed:
            killed.add(stage.pids[1])
            stage.kill(1)
        return take(*words)

    stage.backend.take = taken
    with pytest.raises(WorkerLostError, match=r"rollout rank 1 was lost: .*; this rank lost 4 processes in") as caught:
        stage.run()
    assert "\n" not in str(caught.value)
    assert len(stage.notes) == 3
