"""Facts and state machines, ports, errors, digests. No I/O."""
