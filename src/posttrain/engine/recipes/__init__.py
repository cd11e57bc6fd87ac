"""Algorithms, e.g. SFT and GRPO: one small file each that composes functions and roles."""
