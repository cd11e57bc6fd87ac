"""Composition root of the control side: connects its packages to concrete back-ends. Never imports torch."""
