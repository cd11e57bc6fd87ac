"""Checkpoints and views of the trained weights."""
