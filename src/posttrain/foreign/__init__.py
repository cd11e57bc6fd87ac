"""Conversion of other trainers' files to a run.yaml. The caller names the files; nothing is executed."""
