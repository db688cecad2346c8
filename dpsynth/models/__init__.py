"""Torch code that knows no data."""
