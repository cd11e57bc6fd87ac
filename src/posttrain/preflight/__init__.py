"""Checks of a run before it is submitted: data, placement, confinement of rewards, power of gates, budget."""
