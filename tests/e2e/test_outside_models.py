"""Models that others made, of architectures that differ from ours: from a folder to a released one, and out again.

Phi-3 has fused projections and is decoded by its own module; Llama 3 scales its rotary positions, has an output head of
its own and comes in several files. Both bring a byte-level BPE and a chat template.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_models_out import greedy, judged
from tiny_run import RUN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from workbench import Workbench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"]
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.1, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def phi3(vocabulary: int) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**SHAPE, vocab_size=vocabulary, original_max_position_embeddings=96))


def llama3(vocabulary: int) -> PreTrainedModel:
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=vocabulary, rope_parameters=rope))


def byte_pairs(texts: list[str]) -> PreTrainedTokenizerFast:
    """Learned from the data, as its maker would have learned it from theirs."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, learner)
    begin, end, pad, *_ = SPECIAL
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=begin, eos_token=end, pad_token=pad)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def elsewhere(empty: Workbench) -> Callable[[str], Path]:
    """Makes a folder as `save_pretrained` writes it."""

    def made(family: str) -> Path:
        rows = [json.loads(line) for line in (empty.folder / "train.jsonl").open()]
        tokenizer = byte_pairs([f"Q: sort {row['answer']}" for row in rows])
        torch.manual_seed(1)
        module = {"phi3": phi3, "llama3": llama3}[family](len(tokenizer))
        module.save_pretrained(empty.folder / "theirs", max_shard_size="60KB" if family == "llama3" else "1GB")
        tokenizer.save_pretrained(empty.folder / "theirs")
        return empty.folder / "theirs"

    return made


@pytest.mark.parametrize("family", ["phi3", "llama3"])
def test_it_is_trained_judged_released_and_says_the_same_in_transformers(
    empty: Workbench, elsewhere: Callable[[str], Path], family: str
) -> None:
    theirs = elsewhere(family)
    assert (len(list(theirs.glob("*.safetensors"))) > 1) == (family == "llama3")
    raw = copy.deepcopy(RUN)
    raw["model"] = "model:theirs"
    raw["stages"]["grpo"] |= {"steps": 4, "optimizer": {"learning_rate": 1e-3}}
    raw["stages"]["sft"] |= {"steps": 40, "optimizer": {"learning_rate": 1e-2}}
    empty.write("run.yaml", raw)
    empty.run("asset", "add", "model:theirs", str(theirs))
    empty.run("run", "run.yaml")
    run_id = empty.run_id()
    empty.check(run_id)
    empty.run("export", "prod", "out")
    out = empty.folder / "out"
    trained, base = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (out, theirs)
    )
    assert {name: tensor.shape for name, tensor in trained.items()} == {n: t.shape for n, t in base.items()}
    assert all(not torch.equal(trained[name], base[name]) for name in base), "all of it was trained"
    assert not torch.equal(trained["lm_head.weight"], trained["model.embed_tokens.weight"])
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert config.model_type == ("phi3" if family == "phi3" else "llama")
    rows = judged(empty)
    prompts = [json.loads(line)["prompt"][0]["content"] for line in (empty.folder / "heldout.jsonl").open()]
    said = greedy(out, prompts, 24)
    assert said == [row["response"] for row in rows]
    assert len(set(said)) > 1, "they say something"
