"""The engine: the only layer that imports torch. `engine.config` imports nothing else of it."""
