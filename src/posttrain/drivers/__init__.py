"""Background drivers: the driver of a run, and its handover."""
