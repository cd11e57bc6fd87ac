"""Background drivers: the driver of a run, and the handover of a run to a driver."""
