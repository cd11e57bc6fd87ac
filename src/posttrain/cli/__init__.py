"""Thin commands: each parses its arguments, calls a verb and prints the result. Commands contain no other logic."""
