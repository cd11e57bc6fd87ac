"""Choosing the rollout engine for a model."""

from __future__ import annotations

from posttrain.engine.models import LanguageModel
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.fused_weights import why_not_fusable
from posttrain.engine.rollout.llama_decoder import why_attention_is_plain
from posttrain.engine.rollout.port import RolloutEngine
from posttrain.engine.rollout.stopping import StopStrings


def open_rollout(
    model: LanguageModel, kv_cache: int | None = None, *, texts: StopStrings | None = None
) -> RolloutEngine:
    """The native zero-copy decoder where it computes what the module computes, otherwise the module itself.

    Args:
        kv_cache: bytes that keys and values may take (`runtime.kv_cache`); None: as many as the rows of a call need.
        texts: what the model's tokens say; None: generations with stop strings are refused.
    """
    native = why_not_fusable(model.module) is None
    return NativeRollout(model, kv_cache, texts=texts) if native else ModuleRollout(model, kv_cache, texts=texts)


def decoding_fallbacks(model: LanguageModel) -> dict[str, str]:
    """What is slower, and why.

    `module_decoder`, where `open_rollout` takes the module itself; `plain_attention`, where the native decoder attends
    with plain torch on CUDA.
    """
    why = why_not_fusable(model.module)
    if why is not None:
        return {"module_decoder": f"responses come from the module's own forward: {why}"}
    plain = why_attention_is_plain(model)
    return {} if plain is None else {"plain_attention": f"responses attend by plain torch: {plain}"}
