"""The trackers of runs and the registries of channels: how they are chosen, written and checked."""
