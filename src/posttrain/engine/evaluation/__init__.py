"""Measurements of a model: suites of an evaluation, and probes during training."""
