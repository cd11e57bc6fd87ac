"""Rollout back-ends, one file each, independent of each other."""
