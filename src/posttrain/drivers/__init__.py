"""Background drivers: who drives a run, and giving one away."""
