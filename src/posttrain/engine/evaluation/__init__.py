"""What a model can: suites of an evaluation, and probes during training."""
