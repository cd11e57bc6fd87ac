"""Choosing the rollout engine for a model."""

from __future__ import annotations

from posttrain.engine.models import LanguageModel
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.fused_weights import why_not_fusable
from posttrain.engine.rollout.port import RolloutEngine


def open_rollout(model: LanguageModel, kv_cache: int | None = None) -> RolloutEngine:
    """The native zero-copy decoder where it computes what the module computes, otherwise the module itself.

    Args:
        kv_cache: bytes that keys and values may take (`runtime.kv_cache`); None: as many as the rows of a call need.
    """
    native = why_not_fusable(model.module) is None
    return NativeRollout(model, kv_cache) if native else ModuleRollout(model, kv_cache)


def decoding_fallbacks(model: LanguageModel) -> dict[str, str]:
    """`module_decoder` and the reason, where `open_rollout` takes the module itself."""
    why = why_not_fusable(model.module)
    return {} if why is None else {"module_decoder": f"responses come from the module's own forward: {why}"}
