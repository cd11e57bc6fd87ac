"""What a run is held against before anything is submitted: fit, placement, confinement, power, budget."""
