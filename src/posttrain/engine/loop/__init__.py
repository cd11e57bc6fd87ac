"""The loop of a stage, and a step from samples to weights."""
