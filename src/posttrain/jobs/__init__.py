"""Composition root of launched processes: `python -m posttrain.jobs.KIND ATTEMPT_DIR`."""
