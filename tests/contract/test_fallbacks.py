"""Slower ways that a model must go are foreseen by `plan` and said by the job: in a warning and in a metric."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GraniteConfig, GraniteForCausalLM, PreTrainedModel

from posttrain.domain.jobs import InputBlob, JobOrder, JobResult, Metric, Note
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import character_tokenizer, initial_model, load_scalar_model, save_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.rollout.worker import decoding_fallbacks
from posttrain.jobs import entry
from posttrain.jobs.bodies import evaluation, training
from posttrain.planner.sizes import PACKED_TYPES, expected
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

SMALL = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, context_length=64)
TOKENIZER = character_tokenizer(SMALL.characters)
ROWS = "".join(json.dumps({"prompt": f"Q:{i}", "completion": f"A:{i}", "answer": str(i)}) + "\n" for i in range(4))
WORDS = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, **WORDS))


def _granite() -> PreTrainedModel:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GraniteForCausalLM(GraniteConfig(**shape, num_key_value_heads=1, logits_scaling=3.0, **WORDS))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], set[str]]] = {
    "qwen3": (lambda: initial_model(SMALL, TOKENIZER, 0), set()),
    "bloom": (_bloom, {"padding", "module_decoder"}),
    "granite": (_granite, {"whole_logits", "module_decoder"}),
}
FAMILIES = {name: lambda name=name: families.build(name) for name in families.FAMILIES}


@pytest.mark.parametrize("name", [*families.FAMILIES, "bloom", "granite"])
def test_the_plan_foresees_what_the_engine_does(name: str) -> None:
    module = FAMILIES[name]() if name in FAMILIES else MODELS[name][0]()
    foreseen = expected(json.loads(copy.deepcopy(module.config).to_json_string()), ("policy", "rollout"))
    model = adopt_module(module.eval())
    found = model.fallbacks() | decoding_fallbacks(model)
    assert foreseen.keys() == found.keys()
    assert ("padding" in found) == (model.packing == "padded")
    assert ("module_decoder" in found) == (name not in families.NATIVE)


def test_every_type_that_is_said_to_pack_is_tried_here() -> None:
    tried = {families.build(name).config.model_type for name in families.FAMILIES} | {"granite"}
    assert tried == PACKED_TYPES


def test_alterations_of_a_native_family_are_foreseen() -> None:
    plain = {"model_type": "qwen2", "hidden_act": "silu"}
    assert expected(plain, ("rollout",)) == {}
    for change in (
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "dynamic"}},
        {"quantization_config": {"bits": 4}},
    ):
        assert expected(plain | change, ("rollout",)).keys() == {"module_decoder"}
        assert expected(plain | change, ("policy",)) == {}  # nobody samples


SAID = [(name, kind) for name in MODELS for kind in ("sft", "dataflow", "ppo", "evaluate")]
SAID.remove(("granite", "ppo"))  # transformers has no classifier of that family for a critic


@pytest.mark.parametrize(("name", "kind"), SAID)
def test_the_job_says_it(name: str, kind: str, tmp_path: Path) -> None:
    build, ways = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(adopt_module(build()), TOKENIZER, tmp_path / "model")
    result, attempt = _run(kind, tmp_path)
    assert result.failure is None
    if kind == "sft":
        ways = ways - {"module_decoder"}  # nobody samples
    if kind == "evaluate":
        ways = ways & {"module_decoder"}  # nobody reads whole documents
    if kind == "ppo":  # every model of the stage is of this family
        ways = ways | {f"{role}/{way}" for role in ("critic", "reward_model") for way in ways & {"padding"}}
    told = {metric for metric in result.metrics if metric.startswith("fallback/")}
    assert told == {f"fallback/{way}" for way in ways}
    facts = attempt.facts()[0]
    assert {m for f in facts if isinstance(f, Metric) for m in f.values if m.startswith("fallback/")} == told
    warnings = [fact.message for fact in facts if isinstance(fact, Note) and fact.level == "warning"]
    assert sum("steps updated weights" not in line for line in warnings) == len(ways)


FLOW = """
from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.recipes.algorithm import Update
from posttrain.engine.recipes.dataflow import Dataflow

class flow(Dataflow):
    def form(self, groups, seed):
        return None

    def updates(self, step):
        return (Update("policy", SupervisedObjective),)
"""
PARAMS = {
    "sft": {"data": "data", "steps": 1, "batch_size": 2},
    "dataflow": {
        "data": "data", "recipe": "recipe", "steps": 1, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4,
    },
    "ppo": {
        "data": "data", "reward_model": "judge", "steps": 1, "prompts_per_step": 2, "group_size": 2,
        "max_new_tokens": 4, "kl": None,
    },
    "evaluate": {"model": "model", "suites": {"held": {"data": "suites.held", "max_new_tokens": 4}}},
}  # fmt: skip
SLOTS = {"sft": ["data"], "dataflow": ["data", "recipe"], "ppo": ["data"], "evaluate": ["suites.held"]}


def _run(kind: str, folder: Path) -> tuple[JobResult, AttemptFolder]:
    blobs, attempt = open_blobs(folder / "blobs"), AttemptFolder(folder / "attempt")
    inputs = {"model": InputBlob(put_tree(blobs, folder / "model"), "tree", "model:m@1")}
    if kind == "ppo":
        save_model(load_scalar_model(folder / "model"), TOKENIZER, folder / "judge")
        inputs["reward_model"] = InputBlob(put_tree(blobs, folder / "judge"), "tree", "model:judge@1")
    for slot in SLOTS[kind]:
        text, meta = (FLOW, {"source": f"{kind}_flow.py", "entry": "flow"}) if slot == "recipe" else (ROWS, {})
        inputs[slot] = InputBlob(blobs.put(text.encode()), "file", f"asset:{slot}@1", meta)
    attempt.write_order(JobOrder("n", kind, 5, PARAMS[kind], inputs, blobs.url, str(folder / "cache")))
    assert entry.run(str(attempt.path), evaluation.body if kind == "evaluate" else training.body) == 0
    result = attempt.read_result()
    assert result is not None
    return result, attempt
