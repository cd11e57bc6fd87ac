"""Side-by-side measurements; `python -m benchmarks` runs them all.

Neither the product nor its tests import these modules.
"""
