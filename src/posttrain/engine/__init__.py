"""The engine: the only layer that imports torch. `engine.config` imports no other part of the engine."""
