"""The tables and figures of StraightDP, remade: `python -m benchmarks.straightdp --table 1`."""
