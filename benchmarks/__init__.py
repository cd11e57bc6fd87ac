"""Side-by-side measurements; `python -m benchmarks` runs them all.

Nothing here is imported by the product or its tests.
"""
