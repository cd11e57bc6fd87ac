"""Adapters in the engine: gradients and updates against float64 references, files against peft, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain.domain.adapters import FOLDER, WEIGHTS
from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, Need, TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.adapters import adapter_weights, attach, attached, base_layer, merge, trained_parameters
from posttrain.engine.models.files import ModelSource, ScalarSource, load_model, load_scalar_model, save_model
from posttrain.engine.models.language_model import adopt_classifier, adopt_module, put_scalar_head
from posttrain.engine.models.logprobs import Model, predict
from posttrain.engine.models.sharding import canonical_parameters
from posttrain.engine.roles.training import TorchEngine
from posttrain.engine.settings import LoraConfig, OptimizerConfig, RuntimeConfig
from posttrain.jobs.bodies.cast import cast

LORA = LoraConfig(rank=4, alpha=6.0)
OF_HEAD = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "lm_head"))
BATCH = TokenBatch.pack(
    [Document((5, 9, 7), (11, 4, 30, 2), temperature=1.0), Document((8,), (3, 3, 17), temperature=1.0)]
)
PREDICTED: list[tuple[str, frozenset[Need]]] = [
    ("language", frozenset({"logprobs"})),
    ("language", frozenset({"logprobs", "entropy"})),
    ("value", frozenset({"values"})),
    ("score", frozenset({"scores"})),
]


def model_of(head: str, family: str, dtype: torch.dtype, lora: LoraConfig | None = LORA) -> Model:
    """A model whose adapter is not zero, and whose head of a critic or reward model is not either."""
    module = families.build(family).to(dtype)
    if head != "language":
        module = put_scalar_head(module)
    if lora:
        attach(module, lora, seed=3)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(4)
        for part in module.modules():
            if found := adapter_weights(part):
                found[1].normal_(std=0.2)
        if head != "language":
            module.score.weight.normal_(std=0.3)
    return adopt_module(module) if head == "language" else adopt_classifier(module)


def pulled(model: Model, needs: frozenset[Need]) -> Tensor:
    """A scalar that every prediction enters with its own weight: its gradient is a product with the Jacobian."""
    found = predict(model, BATCH, needs)
    total = torch.zeros((), dtype=torch.float64)
    for need in sorted(needs):
        values = found.of(need).double()
        total = total + (values * torch.linspace(-1.0, 2.0, len(values), dtype=torch.float64)).sum()
    return total


def chain_rule(head: str, dtype: torch.dtype, needs: frozenset[Need], lora: LoraConfig) -> dict[str, Tensor]:
    """The gradients of A and B in float64, from those of whole merged weights: dA = s Bᵀ dW, dB = s dW Aᵀ."""
    adapted = model_of(head, "qwen3", dtype, lora).module.double()
    pairs = {name: found for name, part in adapted.named_modules() if (found := adapter_weights(part))}
    saved = attached(adapted)
    assert saved is not None
    whole = merge(adapted).requires_grad_(True)
    model = adopt_module(whole) if head == "language" else adopt_classifier(whole)
    pulled(model, needs).backward()
    found = {}
    for name, (low, high) in pairs.items():
        gradient = whole.get_submodule(name).weight.grad
        found[f"{name}.lora_A.weight"] = saved.scale * high.T @ gradient
        found[f"{name}.lora_B.weight"] = saved.scale * gradient @ low.T
    if head != "language":
        found["score.weight"] = whole.score.weight.grad
    return found


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-1)], ids=str
)
@pytest.mark.parametrize(("head", "needs"), PREDICTED, ids=lambda value: value if isinstance(value, str) else "")
def test_gradients_are_those_of_the_chain_rule(
    head: str, needs: frozenset[Need], dtype: torch.dtype, near: float
) -> None:
    scalar = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj"), rslora=True)
    lora = scalar if head != "language" else OF_HEAD if "entropy" in needs else LORA
    expected = chain_rule(head, dtype, needs, lora)
    model = model_of(head, "qwen3", dtype, lora)
    pulled(model, needs).backward()
    found = {name: parameter.grad for name, parameter in trained_parameters(model.module)}
    assert found.keys() == expected.keys()
    assert all(p.grad is None for _, p in canonical_parameters(model.module) if not p.requires_grad)
    for name, gradient in found.items():
        assert gradient is not None
        assert float((gradient.double() - expected[name]).norm()) <= near * float(expected[name].norm()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_adam_of_the_adapter_alone(dtype: torch.dtype) -> None:
    model = model_of("language", "llama", dtype)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, max_grad_norm=1e9, schedule="constant")
    held = {name: parameter.detach().clone() for name, parameter in canonical_parameters(model.module)}
    objective = SupervisedObjective(Totals.of(BATCH))
    objective(BATCH, predict(model, BATCH, {"logprobs"})).loss.backward()
    gradients = {name: parameter.grad.double() for name, parameter in trained_parameters(model.module)}
    model.module.zero_grad()
    engine = TorchEngine(RankContext(), model, optimizer, RuntimeConfig(), steps=4, seed=0)
    engine.step(BATCH, objective, step=0)
    for shard in engine.export():
        before = held[shard.name].double()
        if shard.frozen:
            assert torch.equal(shard.tensor.double(), before), shard.name
            continue
        gradient = gradients[shard.name]  # Adam's first step: the bias corrections cancel the decays
        expected = before - 1e-2 * gradient / (gradient.abs() + 1e-8)
        large = gradient.abs() > 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(shard.tensor.double()[large], expected[large], atol=2e-5, rtol=0)
        assert shard.tensor.dtype == torch.float32, "masters are in float32"


def base_folder(folder: Path, family: str = "qwen3") -> Path:
    save_model(adopt_module(families.build(family)), None, folder)
    return folder


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3", LORA), ("qwen3", OF_HEAD), ("llama", OF_HEAD), ("gemma2", LORA)], ids=str
)
def test_peft_reads_what_is_written_and_a_merged_model_computes_the_same(
    family: str, lora: LoraConfig, tmp_path: Path
) -> None:
    folder = base_folder(tmp_path / "model", family)
    model = model_of("language", family, torch.float32, lora)
    save_model(model, None, folder)
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == ["adapter_config.json", WEIGHTS]
    ids = torch.tensor([[5, 9, 7, 11, 4, 30]])
    with torch.no_grad():
        mine = model.module(ids).logits
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), folder / FOLDER)(ids).logits
        torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=0)
        again = load_model(folder)
        assert torch.equal(again.module(ids).logits, mine)
        merged = adopt_module(merge(again.module))
        torch.testing.assert_close(merged.module(ids).logits, mine, atol=1e-4, rtol=0)
        save_model(merged, None, tmp_path / "merged")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(plain(ids).logits, merged.module(ids).logits)
    before = (folder / FOLDER / WEIGHTS).read_bytes()
    save_model(load_model(folder), None, folder)
    assert (folder / FOLDER / WEIGHTS).read_bytes() == before, "equal weights are equal bytes"


def test_a_sum_that_the_type_of_a_merged_export_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    model = model_of("language", "qwen3", torch.float32)
    with torch.no_grad():  # base and adapter fit into float16, their sum does not
        for layer in model.module.modules():
            if found := adapter_weights(layer):
                found[0].fill_(100.0)
                found[1].fill_(250.0)
    save_model(model, None, folder)
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    with pytest.raises(InputError, match="not every weight is finite in float16; export bfloat16 or float32, or --ad"):
        list(cast({"folder": str(folder), "dtype": "float16", "merge": True}))
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before
    (told,) = cast({"folder": str(folder), "dtype": "bfloat16", "merge": True})
    weights = load_file(folder / "model.safetensors")
    assert told == {"file": "model.safetensors", "tensors": len(weights), "dtype": "bfloat16"}
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert not (folder / FOLDER).exists()


def test_a_merged_sum_is_rounded_once(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    save_model(model_of("language", "qwen3", torch.float32), None, folder)
    precise = merge(load_model(folder).module).state_dict()
    list(cast({"folder": str(folder), "dtype": "bfloat16", "merge": True}))
    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(weight, precise[name].to(torch.bfloat16)) for name, weight in written.items())


def test_a_critic_has_the_setting_of_its_policy_without_the_output_head() -> None:
    both = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "lm_head"))
    names = {name for name, _ in trained_parameters(model_of("value", "qwen3", torch.float32, both).module)}
    assert {name.split(".")[-3] for name in names if "lora_A" in name} == {"q_proj"}
    assert "score.weight" in names


def test_a_scalar_models_head_belongs_to_its_adapter(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    model = model_of("score", "qwen3", torch.float32)
    save_model(model, None, folder)
    again = load_scalar_model(folder)
    assert torch.equal(predict(again, BATCH, {"scores"}).of("scores"), predict(model, BATCH, {"scores"}).of("scores"))
    with pytest.raises(InputError, match="causal language model, got a sequence classifier"):
        load_model(folder)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    theirs, ids = PeftModel.from_pretrained(base, folder / FOLDER), torch.tensor([[5, 9, 7, 11, 4, 30, 2]])
    one = TokenBatch.pack([Document((5, 9, 7), (11, 4, 30, 2))])
    with torch.no_grad():
        mine = predict(again, one, {"scores"}).of("scores")
        torch.testing.assert_close(theirs(ids).logits[0], mine, atol=1e-5, rtol=0)


def test_a_critic_begins_with_the_adapter_of_its_policy(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    policy = model_of("language", "qwen3", torch.float32)
    save_model(policy, None, folder)
    critic = ScalarSource(folder, "float32", LORA).open("cpu")
    own = dict(trained_parameters(critic.module))
    assert torch.equal(own.pop("score.weight"), torch.zeros(1, 32))
    for name, parameter in trained_parameters(policy.module):
        assert torch.equal(own.pop(name), parameter)
    assert not own


def test_a_new_adapter_changes_nothing_and_depends_on_its_seed_alone(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    plain, before = ModelSource(folder, "float32").open("cpu"), torch.random.get_rng_state()
    made = [ModelSource(folder, "float32", LORA, seed).open("cpu") for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    for one in made:
        assert torch.equal(
            predict(one, BATCH, {"logprobs"}).of("logprobs"), predict(plain, BATCH, {"logprobs"}).of("logprobs")
        )
    first, second, third = ({n: p for n, p in trained_parameters(one.module) if "lora_A" in n} for one in made)
    assert all(torch.equal(first[name], second[name]) and not torch.equal(first[name], third[name]) for name in first)
    assert {name.split(".")[-3] for name in first} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert all(type(base_layer(part)) is nn.Linear for part in made[0].module.modules() if adapter_weights(part))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ("query",)}, "no linear layer is named query; the model has down_proj, gate_proj, k_proj"),
        ({"targets": ("embed_tokens",)}, "no linear layer is named embed_tokens"),
        ({"rank": 17}, "rank must be at most 16, the size of k_proj, got 17"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attach(families.build("llama"), LoraConfig(**{"rank": 4, **lora}), seed=0)


def test_files_that_are_not_an_adapter_of_their_base_are_refused(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "model")
    save_model(model_of("language", "qwen3", torch.float32), None, folder)
    file = folder / FOLDER / WEIGHTS
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(InputError, match=r"up_proj.lora_B.weight has shape none, the base needs \[48, 4\]"):
        load_model(folder)
    save_file({**tensors, "base_model.model.model.norm.weight": torch.ones(32)}, file)
    with pytest.raises(InputError, match=r"model.norm.weight has shape \[32\], the base needs none"):
        load_model(folder)
    file.write_bytes(b"x" * 40)
    with pytest.raises(InputError, match="cannot be read"):
        load_model(folder)
    save_file(tensors, file)
    with pytest.raises(InputError, match="has an adapter of rank 4, which the stage continues, but it declares rank 8"):
        load_model(folder, adapter=LoraConfig(rank=8, alpha=6.0))
    config = json.loads((folder / FOLDER / "adapter_config.json").read_text())
    (folder / FOLDER / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(InputError, match="use_dora must be unset, since only plain LoRA is supported, got True"):
        load_model(folder)
