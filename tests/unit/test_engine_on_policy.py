"""The loop around an algorithm that samples: what it keeps, replaces, counts and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, EvenTokens, inline, quiet, weights

from posttrain.domain.errors import BudgetExceededError
from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import DataflowConfig
from posttrain.engine.controller import Controller, Limits
from posttrain.engine.models.initial import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.algorithm import Drop, PromptSource, ScoredGroup, Update, pack
from posttrain.engine.recipes.dataflow import Dataflow
from posttrain.engine.recipes.on_policy import OnPolicy
from posttrain.engine.recipes.opening import open_roles
from posttrain.engine.settings import PolicyGradientOptimizerConfig


class Picky(Dataflow):
    """Drops the groups of some places in the data stream, and learns the rest by heart."""

    dropped: frozenset[int] = frozenset({1, 2, 4})
    refills = 2

    def __init__(self, config: DataflowConfig) -> None:
        super().__init__(config)
        self.formed: list[list[int]] = []

    @property
    def source(self) -> PromptSource:
        return replace(super().source, refills=self.refills)

    def keep(self, group: ScoredGroup) -> Drop | None:
        return Drop("not to be learnt") if group.group.key in self.dropped else None

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        self.formed.append([group.group.key for group in groups])
        return pack(groups)

    def updates(self, step: int) -> Sequence[Update]:
        return (Update("policy", SupervisedObjective),)


def stage(algorithm: type[Picky] = Picky, **changes: Any) -> tuple[OnPolicy, Picky]:
    options = {"recipe": "a:b", "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 3, "group_size": 2}
    optimizer = PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=1)
    config = DataflowConfig(**{**options, "max_new_tokens": 4, "optimizer": optimizer, **changes})
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    made = algorithm(config)
    return OnPolicy(config, made, roles, PROMPTS, EvenTokens(), 11), made


def test_dropped_groups_are_replaced_in_the_order_of_the_stream() -> None:
    recipe, picky = stage()
    report = recipe.step(0, quiet(0))
    assert picky.formed == [[0, 3, 5]], "0 1 2, then 3 4 for the two that were dropped, then 5"
    assert recipe.journal.consumed == 6
    assert report.metrics["groups/dropped"] == pytest.approx(3 / 6)
    recipe.step(1, quiet(1))
    assert picky.formed[1] == [6, 7, 8]


def test_after_so_many_rounds_a_step_trains_on_what_there_is() -> None:
    class Never(Picky):
        dropped = frozenset(range(1, 100))

    recipe, never = stage(Never)
    before = weights(recipe)
    recipe.step(0, quiet(0))
    assert (never.formed, recipe.journal.consumed) == ([[0]], 3 + 2 + 2)
    assert any(not torch.equal(before[name], value) for name, value in weights(recipe).items())


def test_everything_sampled_is_counted_and_reserved_before_it_is_asked_for() -> None:
    """And what was kept until then is still to be trained on."""
    asked: list[tuple[int, int]] = []
    kept: list[int] = []  # tokens of the documents

    class Counting(Picky):
        def keep(self, group: ScoredGroup) -> Drop | None:
            verdict = super().keep(group)
            kept.append(0 if verdict else sum(len(answer) for answer in group.answers))
            return verdict

    recipe, _ = stage(Counting)
    spent = recipe.step(0, quiet(0), lambda spent, more: asked.append((spent, more))).tokens
    prompt, limit, samples = 3, 4, 2
    for missing, there, (_, more) in zip((2, 1), (sum(kept[:3]), sum(kept[:5])), asked, strict=True):
        generated = missing * samples * limit
        assert more == missing * prompt + generated + there + missing * samples * prompt + generated
    assert 0 < asked[0][0] < asked[1][0] < spent
    assert sum(asked[-1]) >= spent, "what nothing was dropped of any more"


def test_what_replaces_a_group_must_be_affordable(tmp_path: Path) -> None:
    recipe, _ = stage()
    price = recipe.price(0)
    controller = Controller(recipe, tmp_path, "sha256:x", 100, lambda fact: None, limits=Limits(tokens=price + 1))
    before = weights(recipe)
    with pytest.raises(BudgetExceededError, match="replacing dropped groups"):
        controller.run()
    assert 0 < controller.tokens <= price, "what it had sampled is billed"
    assert all(torch.equal(before[name], value) for name, value in weights(recipe).items())


def test_responses_depend_on_the_place_in_the_stream_and_on_nothing_else() -> None:
    """So a group that came in as a replacement says what it would have said in the first place."""

    def answers(algorithm: type[Picky]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}

        class Listening(algorithm):  # type: ignore[misc,valid-type]
            def keep(self, group: ScoredGroup) -> Drop | None:
                found[group.group.key] = [str(answer.response.tolist()) for answer in group.answers]
                verdict: Drop | None = super().keep(group)
                return verdict

            def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
                return None  # the weights stay

        recipe, _ = stage(Listening)
        for step in range(2):
            recipe.step(step, quiet(step))
        return found

    class Content(Picky):
        dropped: frozenset[int] = frozenset()

    picky, content = answers(Picky), answers(Content)
    assert {key: picky[key] for key in range(6)} == {key: content[key] for key in range(6)}
