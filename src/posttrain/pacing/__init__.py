"""Pure scheduling arithmetic (admission, staleness, balancing), without torch."""
