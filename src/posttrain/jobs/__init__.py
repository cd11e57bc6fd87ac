"""The composition root of launched processes: `python -m posttrain.jobs.KIND ATTEMPT_DIR`."""
