"""The trackers of runs and the registries of channels: their choice, their writers, their states."""
