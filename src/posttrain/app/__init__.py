"""Composition root: connects the packages of the control side to concrete back-ends, and never imports torch."""
