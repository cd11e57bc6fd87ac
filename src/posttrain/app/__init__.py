"""Composition root of the control side: wires planes to concrete back-ends. Never imports torch."""
