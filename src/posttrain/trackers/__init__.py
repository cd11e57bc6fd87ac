"""The trackers of runs and the registries of channels: which, who writes them, how they stand."""
