"""Frozen packed batches."""
