"""Readers of other programs' files: runs to register, and trainers' settings to convert to a run.yaml.

The caller names the files; no code in them is executed.
"""
