"""Curves, progress, timelines and trackers of runs, read from the ledger and attempt folders."""
