"""Timed and scored comparisons; never part of the test run. `python -m benchmarks.NAME`."""
