"""Guidance of a frozen text-to-image prior, measured on a small one: `-m benchmarks.frozen`."""
