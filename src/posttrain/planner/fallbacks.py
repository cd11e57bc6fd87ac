"""Which slower ways the engine will take with a model, as far as its configuration tells; the job tries and says.

padding          batches are padded instead of packed: compute on tokens that nobody reads
module_decoder   responses come from the module's own forward, not from the native zero-copy decoder
plain_attention  on CUDA responses attend by plain torch: only the job can try this torch's variable-length attention
whole_logits     the output head is not a plain matrix, so all logits of a micro-batch are held at once
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# Model types that a contract test compares with what the engine does.
PACKED_TYPES = frozenset({"gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "mistral"})
NATIVE_TYPES = frozenset({"llama", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_SCALED_HEADS = ("logit_scale", "logits_scaling")  # Cohere, Granite: logits are scaled after the head


def expected(config: Mapping[str, Any], roles: Collection[str]) -> dict[str, str]:
    """Fall-back → why, for a model of this `config.json` in these roles. Empty where nothing is known of the model."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return {}
    found: dict[str, str] = {}
    reads = set(roles) - {"rollout", "reward"}  # roles that read whole documents
    if reads and kind not in PACKED_TYPES:
        found["padding"] = f"it is not known whether {kind} packs; the job tries it"
    if "rollout" in roles and (why := _not_native(config, kind)):
        found["module_decoder"] = f"the native decoder does not compute {why}"
    scaled = next((name for name in _SCALED_HEADS if config.get(name) not in (None, 1, 1.0)), None)
    if reads and scaled:
        found["whole_logits"] = f"the head scales its logits ({scaled})"
    return found


def _not_native(config: Mapping[str, Any], kind: str) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = set(config.get("layer_types") or ())
    unsupported = {
        f"model type {kind}": kind not in NATIVE_TYPES,
        "this hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding windows": not kinds <= {"full_attention"},
        "these rope_parameters": rope.get("rope_type", "default") not in _STATIC_ROPE,
        "pretraining_tp": config.get("pretraining_tp", 1) not in (1, None),
        "quantized weights": config.get("quantization_config") is not None,
        "soft-capped logits": config.get("final_logit_softcapping") is not None,
    }
    return next((name for name, wrong in unsupported.items() if wrong), None)
