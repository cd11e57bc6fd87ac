"""Checks of a run before it is submitted: fit, placement, confinement, power, budget."""
