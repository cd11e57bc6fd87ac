"""Engines that generate."""

from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.opening import open_rollout
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams

__all__ = ["RolloutEngine", "SamplingParams", "ScriptedRollout", "open_rollout"]
