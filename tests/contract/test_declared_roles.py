"""A dataflow declares a reference, a critic, a teacher and a reward model; its job opens them and fills columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import InputBlob, JobOrder, JobResult, Metric, Note
from posttrain.domain.roles import step_phases
from posttrain.engine.config import DataflowConfig, GRPOConfig, InitModelConfig
from posttrain.engine.models.files import (
    character_tokenizer,
    initial_model,
    load_model,
    load_scalar_model,
    save_model,
)
from posttrain.engine.models.language_model import adopt_module
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.jobs import entry
from posttrain.jobs.bodies import training
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

SMALL = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, context_length=64)
TOKENIZER = character_tokenizer(SMALL.characters)
ROWS = "".join(json.dumps({"prompt": f"Q:{i}", "answer": str(i)}) + "\n" for i in range(4))
FLOW = """
import torch
from posttrain.engine.algorithms.advantages import generalized_advantages
from posttrain.engine.algorithms.objectives import PolicyObjective, ValueObjective
from posttrain.engine.recipes.algorithm import REFERENCE, VALUES, Column, Update
from posttrain.engine.recipes.dataflow import Dataflow

class flow(Dataflow):
    def requires(self, step):
        taught = Column("teacher_logprobs", "teacher", "logprobs")
        return (REFERENCE, VALUES, taught, Column("helpful", "helpful", "scores"))

    def credit(self, batch):
        names = ("reference_logprobs", "values", "teacher_logprobs", "helpful", "behaviour_logprobs")
        torch.save({name: batch.column(name) for name in names} | {"tokens": batch.tokens, "lengths": batch.lengths,
                   "mask": batch.response_mask}, self.config.settings["seen"])
        mask, lengths = batch.response_mask, batch.lengths
        rewards = torch.zeros(len(batch.tokens))
        ends = torch.tensor(lengths).cumsum(0) - 1
        rewards[ends] = batch.column("helpful").float()
        gained = batch.column("teacher_logprobs") - batch.column("reference_logprobs")
        rewards = rewards + 0.1 * torch.where(mask, gained, torch.zeros(()))
        advantages, returns = generalized_advantages(rewards, batch.column("values"), mask, lengths, 1.0, 0.95)
        return batch.with_columns(advantages=advantages, returns=returns)

    def updates(self, step):
        def critic(totals):
            return ValueObjective(totals, 0.2)
        def policy(totals):
            return PolicyObjective(totals, clip_low=0.2, clip_high=0.2)
        return (Update("critic", critic), Update("policy", policy))
"""
ROLES: dict[str, Any] = {
    "reference": {},
    "critic": {"head": "value", "trained": True, "optimizer": {"learning_rate": 1e-2}},
    "teacher": {"model": "roles.teacher"},
    "helpful": {"model": "roles.helpful", "head": "score"},
}
PARAMS: dict[str, Any] = {
    "data": "data", "recipe": "recipe", "steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4,
    "roles": ROLES,
}  # fmt: skip


def _model(folder: Path, seed: int, *, scores: bool = False) -> Path:
    save_model(adopt_module(initial_model(SMALL, TOKENIZER, seed)), TOKENIZER, folder)
    if scores:
        judge = load_scalar_model(folder)
        with torch.no_grad():
            judge.head.weight.copy_(torch.linspace(-1, 1, 16)[None])
        save_model(judge, TOKENIZER, folder)
    return folder


def _run(folder: Path, params: dict[str, Any], seen: Path, kind: str = "dataflow") -> tuple[JobResult, AttemptFolder]:
    blobs, attempt = open_blobs(folder / "blobs"), AttemptFolder(folder / "attempt")
    own = (
        {"reward_model": (2, True)} if kind != "dataflow" else {"roles.teacher": (1, False), "roles.helpful": (2, True)}
    )
    trees = {"model": (0, False), **own}
    inputs = {
        slot: InputBlob(put_tree(blobs, _model(folder / slot, seed, scores=scores)), "tree", f"model:{slot}@1")
        for slot, (seed, scores) in trees.items()
    }
    inputs["data"] = InputBlob(blobs.put(ROWS.encode()), "file", "dataset:data@1", {})
    meta = {"source": f"flow_{folder.name}.py", "entry": "flow"}
    inputs["recipe"] = InputBlob(blobs.put(FLOW.encode()), "file", "recipe:flow@1", meta)
    for name, body in {"reward:long": "len(completion) / 4", "reward:one": "1.0", "reward:none": "None"}.items():
        source = f"def reward(completion):\n    return {body}\n"
        inputs[name] = InputBlob(blobs.put(source.encode()), "file", "path:reward.py", {"source": "reward.py"})
    order = {**params, "settings": {"seen": str(seen)}} if kind == "dataflow" else params
    attempt.write_order(JobOrder("n", kind, 5, order, inputs, blobs.url, str(folder / "cache"), trust_rewards=True))
    assert entry.run(str(attempt.path), training.body) == 0
    result = attempt.read_result()
    assert result is not None
    return result, attempt


def _logprobs(folder: Path, seen: dict[str, Any]) -> torch.Tensor:
    """The log-probability of every response token, in float64, one document after the other."""
    model = load_model(folder).module.double()
    found, begin = torch.zeros(len(seen["tokens"]), dtype=torch.float64), 0
    for length in seen["lengths"]:
        ids = torch.as_tensor(seen["tokens"][begin : begin + length]).long()[None]
        logits = model(input_ids=ids).logits[0, :-1].double()
        picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found[begin + 1 : begin + length] = picked
        begin += length
    return found.detach()


def test_a_dataflow_gets_every_role_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    result, attempt = _run(tmp_path / "one", PARAMS, tmp_path / "seen.pt")
    assert result.failure is None, result.failure
    seen = torch.load(tmp_path / "seen.pt", weights_only=True)
    mask = seen["mask"]
    for column, slot in (("teacher_logprobs", "roles.teacher"), ("reference_logprobs", "model")):
        wanted = _logprobs(tmp_path / "one" / slot, seen)
        assert torch.allclose(seen[column][mask].double(), wanted[mask], atol=1e-5), column
    assert not torch.allclose(seen["teacher_logprobs"][mask], seen["reference_logprobs"][mask], atol=1e-2)
    assert len(seen["helpful"]) == 4
    assert seen["helpful"].abs().min() > 0
    assert seen["values"][mask].abs().max() > 0, "the critic has learned in the first step"
    metrics = {name for fact in attempt.facts()[0] if isinstance(fact, Metric) for name in fact.values}
    assert {"critic/grad_norm", "grad_norm"} <= metrics
    assert list((tmp_path / "one" / "attempt").glob("outputs/model/*.safetensors"))


@pytest.mark.parametrize("kind", ["grpo", "dataflow"])
def test_functions_and_reward_models_are_terms_of_one_sum(kind: str, tmp_path: Path) -> None:
    judge = "reward_model" if kind == "grpo" else "helpful"
    weights = {"long": 1.0, "one": -2.0, judge: 0.5}
    own = {"reward_model": judge} if kind == "grpo" else {"recipe": "recipe", "roles": ROLES}
    plain = {name: value for name, value in PARAMS.items() if name not in ("roles", "recipe")}
    result, attempt = _run(tmp_path, {**plain, **own, "reward": weights}, tmp_path / "seen.pt", kind)
    assert result.failure is None, result.failure
    steps = [fact.values for fact in attempt.facts()[0] if isinstance(fact, Metric) and "reward/mean" in fact.values]
    assert len(steps) == 2
    for step in steps:
        parts = {name: step[f"reward/{name}/mean"] for name in weights}
        assert parts["one"] == 1.0
        assert abs(parts[judge]) > 1e-3
        assert step["reward/mean"] == pytest.approx(
            sum(weights[name] * value for name, value in parts.items()), abs=1e-6
        )


def test_a_term_of_the_sum_without_its_role_is_refused() -> None:
    grpo = {"data": "data", "steps": 1, "model": "base"}
    with pytest.raises(InputError, match=r"reward.reward_model needs a model, got none; set reward_model"):
        NativeTrainer().check("grpo", {**grpo, "reward": {"exact": 1.0, "reward_model": 0.5}})
    with pytest.raises(
        InputError, match=r"reward needs the term reward_model, .* got the terms exact; add reward_model: WEIGHT"
    ):
        NativeTrainer().check("grpo", {**grpo, "reward": {"exact": 1.0}, "reward_model": "rm"})
    contract = NativeTrainer().check(
        "grpo", {**grpo, "reward": {"exact": 1.0, "reward_model": 0.5}, "reward_model": "rm"}
    )
    assert {slot for slot in contract.inputs if slot.startswith("reward")} == {"reward:exact", "reward_model"}
    assert contract.load is not None
    assert contract.load.names == ("policy", "rollout", "reward", "reward_model")


def test_the_contract_names_the_models_and_the_load_has_the_roles() -> None:
    written = {
        **PARAMS,
        "roles": {**ROLES, "teacher": {"model": "model:big"}, "helpful": {"model": "rm", "head": "score"}},
    }
    contract = NativeTrainer().check("dataflow", {**written, "recipe": "flow:flow"})
    assert contract.inputs["roles.teacher"] == ("model", "model:big")
    assert contract.inputs["roles.helpful"] == ("model", "rm")
    assert contract.params["roles"]["teacher"]["model"] == "roles.teacher"
    assert contract.load is not None
    assert contract.load.names == ("policy", "reference", "critic", "teacher", "helpful", "rollout")
    assert contract.load.trained == ("policy", "critic")
    apart = DataflowConfig.model_validate({**written, "recipe": "flow:flow", "placement": {"helpful": {"ranks": 2}}})
    load = apart.load("dataflow")
    assert {name: pool.roles for name, pool in load.pools.items()}["helpful"] == ("helpful",)
    with pytest.raises(InputError, match=r"placement.helpfull: dataflow has no helpfull \(its roles: policy"):
        apart.model_copy(update={"placement": apart.placement.model_validate({"helpfull": {}})}).load("dataflow")
    assert "roles" not in DataflowConfig.model_validate({**PARAMS, "roles": {}}).model_dump(mode="json")


@pytest.mark.parametrize(
    ("roles", "line"),
    [
        ({"policy": {}}, "must be a name other than policy, rollout"),
        ({"Judge": {}}, "Judge"),
        ({"judge": {"head": "score", "trained": True, "model": "rm"}}, "train it in a reward_model stage"),
        ({"judge": {"optimizer": {"learning_rate": 1e-3}}}, "optimizer needs trained: true"),
        ({"judge": {"head": "words"}}, "head"),
    ],
)
def test_roles_that_cannot_be_meant_are_refused(roles: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataflowConfig.model_validate({**PARAMS, "recipe": "flow:flow", "roles": roles})
    assert line in str(caught.value)


def test_each_trained_role_is_priced() -> None:
    params = {**PARAMS, "recipe": "flow:flow", "roles": {"reference": {}}}
    alone, both = (
        NativeTrainer().check("dataflow", {**params, "roles": roles}).work
        for roles in ({"reference": {}}, {"critic": {"head": "value", "trained": True}})
    )
    assert both["trained"] == 2 * alone["trained"]
    assert both["least"] > alone["least"]


def test_two_value_roles_share_a_phase_and_a_trained_model_that_predicts_has_logits() -> None:
    value = {"head": "value", "trained": True}
    roles = DataflowConfig.model_validate(
        {**PARAMS, "recipe": "flow:flow", "roles": {"a": value, "b": value, "second": {"trained": True}}}
    ).roles()
    phases = step_phases(roles)
    assert phases["values"] == ("a", "b")
    assert phases["second"] == ("second",)
    assert list(phases)[-5:] == ["update second", "update b", "update a", "update policy", "weights"]


def test_a_package_that_names_its_roles_is_refused_in_one_line() -> None:
    class Old(GRPOConfig):
        def roles(self) -> Any:
            return ("policy", "rollout")

    with pytest.raises(InputError, match=r"roles\(\) must return RoleSpec values, got 'policy'"):
        Old(data="d", reward="r", steps=2).load("old")


def test_a_function_that_declines_a_step_leaves_the_score_to_the_reward_model(tmp_path: Path) -> None:
    plain = {name: value for name, value in PARAMS.items() if name not in ("roles", "recipe")}
    reward = {"reward": {"none": 1.0, "reward_model": 1.0}, "reward_model": "reward_model"}
    result, _ = _run(tmp_path, {**plain, **reward}, tmp_path / "seen.pt", "grpo")
    assert result.failure is None, result.failure


PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-yaml" / "dataflow.md"


def test_the_class_of_the_page_runs_and_an_idle_role_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(from functools.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    monkeypatch.setattr("test_declared_roles.FLOW", source.replace("class Flow(", "class flow("))
    reward = {"long": 1.0, "helpful": 0.5}
    result, attempt = _run(tmp_path, {**PARAMS, "reward": reward}, tmp_path / "seen.pt")
    assert result.failure is None, result.failure
    told = [fact.message for fact in attempt.facts()[0] if isinstance(fact, Note) and fact.level == "warning"]
    assert [line for line in told if line.startswith("role ")] == [
        "role reference of flow is not used by a column, an update or the reward; use it, or remove the role"
    ]
