"""The trackers of runs and the registries of channels: their choice, writers and states."""
