"""Reads the ledger and attempt folders; renders curves and progress, judges signals."""
