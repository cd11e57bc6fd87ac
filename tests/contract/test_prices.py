"""What a plan says that a stage spends at the least is never more than what its recipe asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from posttrain.domain.kinds import OWN
from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import Document
from posttrain.engine.config import RowsConfig, named, stage_config
from posttrain.engine.loop.controller import FromRows
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.recipe import Recipe
from posttrain.engine.models.files import LabelledRow, PreferencePair
from posttrain.engine.recipes.algorithm import Update
from posttrain.engine.recipes.dataflow import Dataflow
from posttrain.engine.samples import Prompt
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.planner.prospects import Workload, comparable, estimate

SAMPLED = {"prompts_per_step": 3, "max_new_tokens": 5}
JUDGED = {**SAMPLED, "reward": "r"}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"batch_size": 4}),
    "reward model": ("reward_model", {"batch_size": 4}),
    "grpo": ("grpo", {**JUDGED, "group_size": 4}),
    "dpo": ("dpo", {"batch_size": 4}),
    "orpo": ("orpo", {"batch_size": 4}),
    "simpo": ("simpo", {"batch_size": 4}),
    "kto": ("kto", {"batch_size": 4}),
    "gspo": ("gspo", {**JUDGED, "group_size": 4}),
    "cispo": ("cispo", {**JUDGED, "group_size": 4}),
    "rloo": ("rloo", {**JUDGED, "group_size": 4}),
    "dr grpo": ("dr_grpo", {**JUDGED, "group_size": 4}),
    "dapo, which replaces nothing yet": ("dapo", {**JUDGED, "group_size": 4}),
    "reinforce++": ("reinforce_plus_plus", {**JUDGED, "kl": None}),
    "ppo": ("ppo", {**JUDGED, "kl": None}),
    "ppo of one sample in three epochs": ("ppo", {**JUDGED, "kl": None, "group_size": 1, "ppo_epochs": 3}),
    "ppo that warms its critic up": ("ppo", {**JUDGED, "kl": None, "critic": {"warmup": 1}, "steps": 2}),
    "pf_ppo": ("pf_ppo", {**JUDGED, "kl": None, "group_size": 4}),
    "pf_ppo of the best": ("pf_ppo", {**JUDGED, "kl": None, "group_size": 4, "filter": "best"}),
    "vapo": ("vapo", {**JUDGED, "group_size": 4, "critic": {"warmup": 0}}),
    "dataflow": ("dataflow", {**SAMPLED, "recipe": "mine"}),
    "dataflow that says what it spends": ("dataflow", {**SAMPLED, "recipe": "mine", "tokens_per_step": 7}),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_least_of_one_step_is_its_price_with_documents_of_one_token(name: str) -> None:
    kind, params = STAGES[name]
    params = {"data": "d", "steps": 1, **params}
    prices = [recipe(kind, params, length).max_tokens(params["steps"] - 1) for length in (1, 2)]
    least = NativeTrainer().check(kind, {**params, "steps": max(1, params["steps"])}).work["least"]
    before = (params["steps"] - 1) * (3 + 3 * 4)  # prompts and samples of one token
    assert least - before <= prices[0] <= prices[1]
    if kind not in (
        "sft",
        "dpo",
        "orpo",
        "simpo",
        "kto",
        "reward_model",
    ):  # of those a document has at least two tokens
        assert least - before == prices[0]


def recipe(kind: str, params: dict[str, Any], length: int) -> Recipe:
    """A recipe over rows of so many tokens, with roles that do nothing."""
    config: Any = stage_config(kind, params)
    nothing: Any = Anything()
    roles = Roles({config.roles()[0].name: nothing, "critic": nothing}, {"reference": nothing})
    made: Any = Mine if kind == "dataflow" else named(OWN[kind].algorithm.algorithm)  # type: ignore[union-attr]
    tokens = tuple(range(1, length + 1))
    prompts, scorer = [Prompt(tokens) for _ in range(9)], nothing
    if isinstance(config, RowsConfig):
        row: Any = {
            "demonstrations": Document(tokens, tokens),
            "pairs": PreferencePair(0, tokens, tokens, tokens),
            "labels": LabelledRow(tokens, tokens, True),
        }[config.reads]
        return FromRows(config, made(config), roles, [row] * 9, 1)
    return OnPolicy(config, made(config), roles, prompts, scorer, 1)


class Anything:
    """A group whose model predicts whatever it is asked for; nothing else is asked."""

    def one(self, method: Any) -> frozenset[str]:
        return frozenset({"logprobs", "entropy", "values", "scores"})


class Mine(Dataflow):
    """Trains on everything once."""

    def updates(self, step: int) -> Sequence[Update]:
        return (Update("policy", SupervisedObjective),)


def test_a_plan_tells_what_replaces_dropped_groups() -> None:
    """A budget that covers what is said at the most is never short of it."""
    params = {"data": "d", "steps": 2, **JUDGED, "group_size": 4}
    once, thrice = (NativeTrainer().check("dapo", {**params, "refills": refills}).work for refills in (0, 2))
    one, three = (estimate(Workload("dapo", work, length=7.0), []).most for work in (once, thrice))
    sampled = 2 * (3 * 7 + 12 * 5)
    assert one is not None
    assert three == one + 2 * sampled
    assert not comparable(Workload("dapo", once), Workload("dapo", thrice))
