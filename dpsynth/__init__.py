"""dpsynth: private release of synthetic images."""

__version__ = "0.1.0"
