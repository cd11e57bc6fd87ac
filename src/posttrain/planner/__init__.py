"""Estimates of tokens, time and memory by pure arithmetic."""
