"""Engines that generate."""

from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.port import Completion, Generation, RolloutEngine, SamplingParams
from posttrain.engine.rollout.worker import generate, open_rollout

__all__ = [
    "Completion",
    "Generation",
    "RolloutEngine",
    "SamplingParams",
    "ScriptedRollout",
    "generate",
    "open_rollout",
]
