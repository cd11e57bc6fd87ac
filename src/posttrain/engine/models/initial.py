"""A model from nothing.

Random weights, a character tokenizer with a chat template. For demos and tests without a download.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.engine.config import InitModelConfig

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
ROLES = ("system", "user", "assistant")
_ROLE_TOKENS = [f"<|{role}|>" for role in ROLES]

# A turn is <|im_start|><|role|>content<|im_end|>. The generation marks let Hugging Face's own assistant mask work too.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant, got ' + m['role']) }}{% endif %}"
    "<|im_start|>{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
)

_ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character of `characters`, after seven special ones; anything else is `<|unk|>`."""
    vocabulary = [PAD, START, END, UNKNOWN, *_ROLE_TOKENS, *characters]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=_ROLE_TOKENS,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def initial_model(config: InitModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Random weights in float32 on the CPU.

    The same (config, seed) gives the same bytes. The global generator is left alone.
    """
    config_class, model_class = _ARCHITECTURES[config.architecture]
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    architecture = config_class(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(architecture).float()
    for name, value in special.items():
        setattr(model.generation_config, name, value)
    return model
