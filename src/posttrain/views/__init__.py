"""Read-only views of runs for people: status, logs, curves, traces, comparisons, reports."""
