"""Pure arithmetic: estimates of tokens, time and memory."""
