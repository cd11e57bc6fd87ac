"""Choosing the rollout engine for a model."""

from __future__ import annotations

from posttrain.engine.models import LanguageModel
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.fused_weights import why_not_fusable
from posttrain.engine.rollout.port import RolloutEngine


def open_rollout(model: LanguageModel) -> RolloutEngine:
    """The native zero-copy decoder where it computes what the module computes, otherwise the module itself."""
    return NativeRollout(model) if why_not_fusable(model.module) is None else ModuleRollout(model)
