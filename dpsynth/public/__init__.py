"""Reads public data only: pretraining, geometry, calibrations."""
