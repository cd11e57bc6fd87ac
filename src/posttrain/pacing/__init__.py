"""Pure scheduling arithmetic (admission, staleness, balancing). No torch."""
