"""Telling the outside of events: rules, messages, delivery; the port of sinks, and a back-end each in `sinks/`."""
