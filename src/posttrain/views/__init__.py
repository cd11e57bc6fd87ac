"""Views of runs for people: status, logs, curves, traces, comparisons, reports. Read-only."""
