"""The engine: the only floor that imports torch. `engine.config` reaches nothing else of it."""
