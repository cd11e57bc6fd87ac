"""What people look at of runs: status, logs, curves, traces, comparisons, reports. Reads only."""
