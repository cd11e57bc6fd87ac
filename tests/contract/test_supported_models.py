"""The table of model architectures in docs/reference/models.md, measured on a small random model of each.

`GOLDEN=write` writes the table anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.models.files import load_model, save_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.rollout.llama_decoder import why_not_fusable
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import generate, open_rollout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- models:begin -->\n", "<!-- models:end -->"
WRITES = os.environ.get("GOLDEN") == "write"
SHAPE: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = "Gemma3ForConditionalGeneration"
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Class name without `ForCausalLM` → what its configuration needs beside the shape.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3": {"head_dim": 8, "query_pre_attn_scalar": 8},
    VISION: {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Phi": {},
    "Phi3": {},
    "GPT2": {"n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2": {},
    "Olmo3": {},
    "SmolLM3": {},
    "Granite": {},
    "Starcoder2": {},
    "StableLm": {},
    "Cohere2": {"logit_scale": 1.0},
    "Nemotron": {},
    "Glm4": {"head_dim": 8},
    "Exaone4": {},
    "Ernie4_5": {},
    "SeedOss": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Falcon": {},
    "Mamba": {"state_size": 4},
}
PROMPTS = [[5, 9, 30, 7, 12], [40, 3, 22], [11, 50, 8, 8, 19, 4, 33, 21]]
DOCUMENTS = [Document([5, 9, 30, 7], [12, 40, 2]), Document([11, 50], [8, 19, 4, 33, 2])]


def called(name: str) -> str:
    """The class of an architecture in transformers."""
    return {"GPT2": "GPT2LMHeadModel", VISION: VISION}.get(name, f"{name}ForCausalLM")


def build(name: str) -> PreTrainedModel:
    """A random model of an architecture in evaluation mode, float32; the same one each time."""
    model: type[PreTrainedModel] = getattr(transformers, called(name))
    config: Any = model.config_class
    shape = {**SHAPE, **ARCHITECTURES[name]}
    if name == VISION:
        image = {"image_token_index": 60, "boi_token_index": 59, "eoi_token_index": 58, "mm_tokens_per_image": 4}
        shape = {"text_config": shape, "vision_config": {**TOWER, "image_size": 28, "patch_size": 14}, **image}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return model(config(**shape)).eval()


@dataclass(frozen=True)
class Row:
    """The measurements of one architecture."""

    architecture: str
    trains: str  # `packed`, `padded`, or `no`
    decodes: str  # `native`, `transformers`, or `no`
    greedy: str  # `equal`, `different`, or `no`
    exports: str  # `yes` or `no`

    def line(self) -> str:
        cells = (f"`{called(self.architecture)}`", self.trains, self.decodes, self.greedy, self.exports)
        return f"| {' | '.join(cells)} |\n"


def measured(name: str, folder: Path) -> Row:
    try:
        model = adopt_module(build(name))
    except InputError:
        return Row(name, "no", "no", "no", "no")
    decodes = "native" if why_not_fusable(model.module) is None else "transformers"
    greedy = answers_are_equal(name)
    exports = export_is_equal(model, folder)
    trains = model.packing if loss_and_gradient_are_equal(name, model) and loss_falls(model) else "no"
    return Row(name, trains, decodes, "equal" if greedy else "different", "yes" if exports else "no")


def loss_of(model: LanguageModel) -> Tensor:
    return -token_logprobs(model, TokenBatch.pack(DOCUMENTS), response_only=True).sum()


def loss_and_gradient_are_equal(name: str, model: LanguageModel) -> bool:
    """Whether a packed batch has the loss and the gradient that transformers gives its documents one by one."""
    reference, loss = build(name), torch.zeros(())
    for document in DOCUMENTS:
        tokens = torch.tensor([[*document.prompt, *document.response]])
        logprobs = reference(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        loss = loss - logprobs[len(document.prompt) - 1 :].sum()
    loss.backward()
    ours = loss_of(model)
    ours.backward()
    pairs = [(ours.detach(), loss.detach())]
    theirs = {key: parameter.grad for key, parameter in reference.named_parameters()}
    for key, parameter in model.module.named_parameters():
        expected = theirs[key]
        if parameter.grad is None or expected is None:
            if ("vision" not in key and "projector" not in key) or parameter.grad is not expected:
                return False
            continue  # text alone does not reach the vision tower
        pairs.append((parameter.grad, expected))
    return all(float((left - right).abs().max()) <= 1e-3 * max(1.0, float(right.abs().max())) for left, right in pairs)


def loss_falls(model: LanguageModel) -> bool:
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=5e-3)
    before = float(loss_of(model).detach())
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return float(loss_of(model).detach()) < 0.8 * before


def answers_are_equal(name: str) -> bool:
    sampling = SamplingParams(max_new_tokens=12, greedy=True)
    found = generate(open_rollout(adopt_module(build(name))), PROMPTS, samples=1, sampling=sampling)
    reference = build(name)
    for one, prompt in zip(found, PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        if one.document.response.tolist() != out[0, len(prompt) :].tolist():
            return False
    return True


def export_is_equal(model: LanguageModel, folder: Path) -> bool:
    """Whether transformers loads the export with the logits that Posttrain loads it with."""
    save_model(model, None, folder)
    tokens = torch.tensor([PROMPTS[0]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return bool((theirs(tokens).logits - load_model(folder).module(tokens).logits).abs().max() < 1e-4)


def shown() -> dict[str, str]:
    """Architecture → its line of the page."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return {line.split("`")[1]: f"{line}\n" for line in table.splitlines() if "`" in line}


def test_the_page_has_a_line_for_every_architecture() -> None:
    assert WRITES or list(shown()) == list(map(called, ARCHITECTURES))


@pytest.mark.slow
def test_the_page_has_what_each_architecture_does(tmp_path: Path) -> None:
    rows = [measured(name, tmp_path / name) for name in ARCHITECTURES]
    if WRITES:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        head = "\n| architecture | trains | decodes with | greedy answers | exports |\n|---|---|---|---|---|\n"
        PAGE.write_text(f"{before}{BEGIN}{head}{''.join(row.line() for row in rows)}\n{END}{after}", encoding="utf-8")
    assert {called(row.architecture): row.line() for row in rows} == shown()
