"""QLoRA with the real bitsandbytes: what is trained beside 4 bits, what it leaves, and what the planner counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import PreferenceObjective, SupervisedObjective, Totals
from posttrain.engine.batch import Document, Need, TokenBatch
from posttrain.engine.config import DPOConfig, InitModelConfig, RewardModelConfig, SFTConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_learner
from posttrain.engine.models.adapters import adapter_weights, base_layer, trained_parameters
from posttrain.engine.models.files import ModelSource, ScalarSource, character_tokenizer, initial_model, load_model
from posttrain.engine.models.logprobs import predict
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.settings import AdapterConfig, LoraConfig, OptimizerConfig

pytestmark = pytest.mark.ecosystem
bitsandbytes = pytest.importorskip("bitsandbytes")
LORA = LoraConfig(rank=4, alpha=8.0)
SIZE = InitModelConfig(hidden_size=128, intermediate_size=256, layers=2, heads=2, kv_heads=1)
PAIR = [Document((5, 9, 7), (11, 4, 30, 2), temperature=1.0), Document((5, 9, 7), (3, 3, 17), temperature=1.0)]
OPTIMIZER = OptimizerConfig(learning_rate=2e-3, warmup_steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("base")
    initial_model(SIZE, character_tokenizer(SIZE.characters), 0).save_pretrained(made)
    return made


def dequantised(layer: Any) -> Tensor:
    """The weights with which a layer of bitsandbytes computes; how it stores them depends on the processor."""
    found: Tensor = layer(torch.eye(layer.in_features)).T
    return found


def test_the_gradient_is_that_of_the_weights_that_four_bits_hold(folder: Path) -> None:
    model = ModelSource(folder, "float32", LORA, 3, "nf4").open("cpu")
    with torch.no_grad():
        for part in model.module.modules():
            if found := adapter_weights(part):
                found[1].normal_(std=0.1)
    plain = ModelSource(folder, "float32", LORA, 3).open("cpu")
    layers = {n: base_layer(p) for n, p in model.module.named_modules() if adapter_weights(p)}
    assert layers
    with torch.no_grad():
        for name, layer in layers.items():
            assert layer.weight.dtype == torch.uint8
            base_layer(plain.module.get_submodule(name)).weight.copy_(dequantised(layer))
        own = dict(trained_parameters(plain.module))
        for name, weight in trained_parameters(model.module):
            assert weight.dtype == torch.float32
            own[name].copy_(weight)
    batch, needs = TokenBatch.pack(PAIR), frozenset[Need]({"logprobs"})
    for one in (model, plain):
        predict(one, batch, needs).of("logprobs").sum().backward()
    for name, weight in trained_parameters(model.module):
        expected = own[name].grad
        assert expected is not None
        assert weight.grad is not None
        assert float((weight.grad - expected).norm()) <= 1e-4 * float(expected.norm()), name


@pytest.mark.parametrize(
    ("config", "source", "objective"),
    [
        (SFTConfig, ModelSource, SupervisedObjective),
        (DPOConfig, ModelSource, SupervisedObjective),
        (RewardModelConfig, ScalarSource, PreferenceObjective),
    ],
    ids=["sft", "dpo", "reward_model"],
)
def test_a_quantised_base_is_trained_and_the_adapter_fits_the_whole_one(
    config: Any, source: Any, objective: Any, folder: Path, tmp_path: Path
) -> None:
    options = {"data": "d", "steps": 8, "batch_size": 1, "optimizer": OPTIMIZER}
    made = config(**options, adapter=AdapterConfig(lora=LORA, quantize="nf4"))
    with ResourcePool(InlineBackend()) as pool:
        roles = open_learner(made, source(folder, "float32", LORA, 3, "nf4"), 1, lambda role: pool)
        batch = TokenBatch.pack(PAIR, unit=2)
        losses = [
            roles.made.map(TrainWorker.update, batch, objective(Totals.of(batch)), step=step).metrics["loss"]
            for step in range(8)
        ]
        assert losses[-1] < losses[0]
        if config is DPOConfig:
            assert set(roles.recalled) == {"reference"}
        (tmp_path / "model").mkdir()
        for path in folder.iterdir():
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
        roles.made.each(TrainWorker.save_model, tmp_path / "model")
    if source is ModelSource:
        whole = predict(load_model(tmp_path / "model"), batch, frozenset[Need]({"logprobs"})).of("logprobs")
        before = predict(load_model(folder), batch, frozenset[Need]({"logprobs"})).of("logprobs")
        mask = batch.response_mask
        assert float(whole[mask].detach().mean()) > float(before[mask].detach().mean()), "it learned for the whole base"


def test_what_cannot_be_quantised_is_refused() -> None:
    from posttrain.engine.config import GRPOConfig

    asked = AdapterConfig(quantize="nf4")
    with pytest.raises(ValueError, match=r"adapter\.quantize must be left out of a kind that samples"):
        GRPOConfig(data="d", reward="r", steps=1, adapter=asked)
    with pytest.raises(ValueError, match=r"adapter\.quantize needs one rank.*got 2 ranks"):
        SFTConfig(data="d", steps=1, adapter=asked, placement={"collocated": {"ranks": 2}})  # type: ignore[arg-type]


def test_without_the_package_the_error_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engine.models.files.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package bitsandbytes.*pip install 'posttrain\[qlora\]'"):
        ModelSource(folder, "float32", LORA, 3, "nf4").open("cpu")
