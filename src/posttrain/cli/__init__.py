"""Thin commands: parse, call, print. They contain no logic."""
