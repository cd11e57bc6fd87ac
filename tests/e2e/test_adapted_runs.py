"""Adapters from run.yaml to a release: training that is killed, what is stored, export, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_run import RUN
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from workbench import Workbench

from posttrain.domain.adapters import FOLDER, WEIGHTS, base_files
from posttrain.store.trees import tree_listing

pytestmark = [pytest.mark.journey, pytest.mark.slow]

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}}


def adapted(bench: Workbench, **changes: dict[str, Any]) -> None:
    """The tiny run with an adapter, which GRPO continues from SFT and compares with its reference."""
    run = copy.deepcopy(RUN)
    run["stages"]["sft"]["adapter"] = LORA
    run["stages"]["grpo"] |= {"adapter": LORA, "kl": {"coefficient": 0.05}}
    for stage, more in changes.items():
        run["stages"][stage] |= more
    bench.write("run.yaml", run)


def test_an_adapter_is_trained_under_kills_measured_shipped_exported_and_added_again(
    template: Workbench, tmp_path: Path
) -> None:
    whole, killed = template.copy(tmp_path / "whole"), template.copy(tmp_path / "killed")
    adapted(whole)
    whole.run("run", "run.yaml")
    adapted(killed)
    mark = tmp_path / "died"
    dies = {"POSTTRAIN_CRASHPOINT": "train.step@7", "POSTTRAIN_CRASHPOINT_ONCE": str(mark)}
    running = killed.start("run", "run.yaml", env=dies)
    killed.wait("the end of an attempt of sft", mark.exists)

    def step_of_grpo() -> Any:
        attempts = killed.attempts(killed.run_id(), "grpo")
        live = [one for one in killed.live("job") if attempts and one.attempt == killed.root / attempts[-1].folder]
        return live if live and attempts and killed.steps(attempts[-1]) else None

    os.kill(killed.wait("a step of grpo", step_of_grpo)[0].pid, signal.SIGKILL)
    assert killed.finish(running).code == 0
    run_id = killed.run_id()
    assert [len(killed.attempts(run_id, stage)) for stage in ("sft", "grpo")] == [2, 2]
    made = whole.outputs(whole.run_id())
    assert killed.outputs(run_id) == made
    stores_the_adapter_only(whole, made)
    first = whole.run_id()
    is_rolled_back(whole, made["grpo"])
    merged_and_adapter_answer_alike(whole, tmp_path, f"{first}/sft", made["sft"])
    own = whole.attempts(whole.run_id(), "grpo")
    assert not any("module" in str(fact) for one in own for fact in whole.facts(one)), "the native decoder samples"


def live(bench: Workbench) -> str:
    """The digest of the model that the channel has."""
    return str(bench.run("get", "prod", "-o", "json").json["live"])


def is_rolled_back(bench: Workbench, digest: str) -> None:
    """A second release of an adapter, compared with the first and taken back."""
    first = bench.run_id()
    bench.run("run", "run.yaml", "--seed", "6")
    second = bench.run_id()
    assert second != first
    assert bench.run("compare", first, second, "-o", "json").json
    assert live(bench) == bench.outputs(second)["grpo"] != digest
    bench.run("rollback", "prod")
    assert live(bench) == digest
    assert bench.run("sample", "prod", "Q: sort 31", "--max-new-tokens", "4", "-o", "json").json["answers"]


def stores_the_adapter_only(bench: Workbench, made: dict[str, str]) -> None:
    with bench.open() as workspace:
        base = tree_listing(workspace.blobs, workspace.catalog.find("model:tiny").digest)
        listings = [tree_listing(workspace.blobs, made[stage]) for stage in ("sft", "grpo")]
    for listing in listings:
        assert base_files(listing) == base
        assert listing.keys() - base.keys() == {f"{FOLDER}/adapter_config.json", f"{FOLDER}/{WEIGHTS}"}
    weights = [listing[f"{FOLDER}/{WEIGHTS}"] for listing in listings]
    assert weights[0].digest != weights[1].digest
    assert weights[0].size < base["model.safetensors"].size


def merged_and_adapter_answer_alike(bench: Workbench, folder: Path, model: str, digest: str) -> None:
    """A model by `sample`, by transformers from the merged folder, and by peft from the adapter."""
    error = bench.run("export", model, str(folder / "no"), code=2).error
    assert "has an adapter, which transformers would ignore" in error
    merged, adapter, base = (str(folder / name) for name in ("merged", "adapter", "base"))
    bench.run("export", model, merged, "--merged")
    told = bench.run("export", model, adapter, "--adapter").out
    assert "an adapter of model:tiny@1: posttrain export model:tiny@1 BASE writes its base" in told
    card = (Path(adapter) / "README.md").read_text()
    assert "library_name: peft" in card
    assert "| adapter of | model:tiny@1 sha256:" in card
    assert "PeftModel.from_pretrained" in card
    bench.run("export", "model:tiny", base)
    error = bench.run("export", "model:tiny", str(folder / "no"), "--merged", code=2).error
    assert "has no adapter, so it cannot be exported as merged" in error
    asked = bench.run("sample", model, "Q: sort 31", "--max-new-tokens", "24", "-o", "json").json
    tokenizer = AutoTokenizer.from_pretrained(merged)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q: sort 31"}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    said = []
    for model in (
        AutoModelForCausalLM.from_pretrained(merged),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter),
    ):
        out = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        said.append(tokenizer.decode(out[:-1] if out[-1] == tokenizer.eos_token_id else out))
    assert said == [asked["answers"][0]["text"]] * 2
    bench.run("asset", "add", "model:again", adapter, "--base", "model:tiny")
    again = bench.run("asset", "ls", "model", "-o", "json").json
    [same] = [one for one in again if one["name"] == "again"]
    assert same["digest"] == digest, "an exported adapter with its base is the model that was exported"
    assert "model model:tiny@1" in bench.run("lineage", "model:again").out
    assert "no whole model, so its base must be given" in bench.run("asset", "add", "model:x", adapter, code=2).error
    wrong = bench.write("wider.yaml", {"hidden_size": 48, "intermediate_size": 64, "layers": 1, "context_length": 96})
    bench.run("asset", "create", "model:wider", str(wrong), "--seed", "1")
    lineage = Path(adapter) / "lineage.json"
    said_base = json.loads(lineage.read_text())["base"]
    refused = bench.run("asset", "add", "model:x", adapter, "--base", "model:wider", code=2).error
    assert f"was trained on {said_base}, got model:wider@1" in refused
    lineage.unlink()
    refused = bench.run("asset", "add", "model:x", adapter, "--base", "model:wider", code=2).error
    assert "must fit model:wider@1" in refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grpo": {"adapter": {"lora": {"rank": 8, "alpha": 8}}}},
            "model sft has an adapter of rank 4, which the stage",
        ),
        (
            {"sft": {"adapter": {"lora": {"rank": 17}}}},
            "adapter.lora.rank must be at most 16, the size of k_proj, got 17",
        ),
        (
            {"grpo": {"adapter": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}}}},
            "lora.dropout must be 0 in this kind",
        ),
        ({"sft": {"adapter": {"lora": {"r": 4}}}}, "adapter.lora.r: unknown key (did you mean 'rank'?)"),
        (
            {"sft": {"adapter": {"lora": {"targets": ["query"]}}}},
            "no linear layer is named query; the model has down_proj",
        ),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_by_the_plan(
    changes: dict[str, Any], message: str, bench: Workbench
) -> None:
    adapted(bench, **changes)
    assert message in bench.run("plan", "run.yaml", code=2).error
    adapted(bench)
    text = bench.run("plan", "run.yaml").out
    assert "reference" not in text, "the policy computes its reference"
    assert text.count("adapter: lora, rank 4, alpha 8, targets auto; base frozen") == 2


def test_an_adapter_of_a_mixture_of_experts_may_have_a_rank_above_their_number(
    bench: Workbench, tmp_path: Path
) -> None:
    folder = tmp_path / "experts"
    bench.run("export", "model:tiny", str(folder))
    given = json.loads((folder / "config.json").read_text())
    shape = {key: given[key] for key in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, **heads)).save_pretrained(folder)
    bench.run("asset", "add", "model:experts", str(folder))
    sft = {**RUN["stages"]["sft"], "steps": 1, "adapter": {"lora": {"rank": 8}}}
    run = {key: value for key, value in RUN.items() if key not in ("gates", "release", "rewards")}
    bench.write("run.yaml", {**run, "model": "model:experts", "stages": {"sft": sft}})
    bench.run("run", "run.yaml")
    sft["adapter"] = {"lora": {"targets": ["gate_proj"]}}
    bench.write("run.yaml", {**run, "model": "model:experts", "stages": {"sft": sft}})
    error = bench.run("plan", "run.yaml", code=2).error
    assert "no linear layer is named gate_proj; the model has k_proj, o_proj, q_proj, v_proj" in error


def test_a_whole_model_is_not_trained_where_it_has_an_adapter(bench: Workbench) -> None:
    run = copy.deepcopy(RUN)
    run["stages"]["sft"]["adapter"] = LORA
    bench.write("run.yaml", run)
    error = bench.run("plan", "run.yaml", code=2).error
    assert (
        "stages.grpo: model sft has an adapter, but the stage trains whole models; add adapter: {lora: {rank: 4"
        in error
    )
