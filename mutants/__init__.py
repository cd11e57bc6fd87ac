"""Mutants of the sources, written by hand, and the tests that must notice them: `make mutants`."""
