"""Handwritten mutants of the sources, and the tests that must fail on them: `make mutants`."""
