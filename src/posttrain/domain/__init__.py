"""Values, state machines, ports, errors and digests. No I/O."""
