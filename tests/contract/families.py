"""Tiny, randomly initialised models of the families that share one contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.engine.models.adapters import adapter_weights, attach, linear_layers
from posttrain.engine.settings import LoraConfig

torch.set_num_threads(1)  # these models are far too small to share their work between threads

VOCABULARY = 61
CONTEXT = 96
EOS = 2
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    **_TOKENS,
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, as byte pairs spell them: letters, words, and pieces of characters that take several tokens."""
    specials = ["<pad>", "<s>", "</s>"]
    halves = ["Ã", "©", "â", "Ĥ¬", "âĤ", "¬"]  # of é and €
    pieces = ["the", "Ġa", "Ġ", "Ċ", "<|im|>", "</", "answer", ">", *halves]
    vocabulary = [*specials, *pieces, *"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ"][:VOCABULARY]
    inner = Tokenizer(models.BPE({piece: at for at, piece in enumerate(vocabulary)}, []))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2, **_TOKENS
    )
    return GPT2LMHeadModel(config)


def _llama() -> PreTrainedModel:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    }
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=scaling))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_SHAPE))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **_SHAPE, head_dim=8, sliding_window=5, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_SHAPE, head_dim=8, sliding_window=5, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=5))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": _mistral,
}
NATIVE = ("llama", "qwen2", "qwen3")  # families that the hand-written decoder takes
ADAPTED = ("qwen3-lora1", "llama-lora8", "qwen2-lora16+head")  # with an adapter of this rank, also of the output head


def build(family: str, *, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """A model of the family in evaluation mode; norms, biases and B are perturbed so that ignoring one shows."""
    family, _, rank = family.partition("-lora")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = FAMILIES[family]()
        if rank:
            rank, _, head = rank.partition("+")
            targets = (*linear_layers(module), "lm_head") if head else "auto"
            attach(module, LoraConfig(rank=int(rank), alpha=2.0 * int(rank), targets=targets), seed)
            for layer in module.modules():
                if found := adapter_weights(layer):
                    found[1].normal_(std=0.1)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    if attention is not None:
        module.set_attn_implementation(attention)
    return module.eval()
