"""Notification of events: rules, messages, delivery; the port of sinks, and their back-ends in `sinks/`."""
