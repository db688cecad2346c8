"""Per-example clipping at nearly the price of a plain backward pass (docs/engine.md)."""

from dpsynth.private.engine.clipper import (
    GRID,
    MARGIN,
    SMALLEST_CLIP,
    ClippedSum,
    Losses,
    PerExampleClipper,
)
from dpsynth.private.engine.settings import DEFAULT, EngineSettings

__all__ = [
    "DEFAULT",
    "GRID",
    "MARGIN",
    "SMALLEST_CLIP",
    "ClippedSum",
    "EngineSettings",
    "Losses",
    "PerExampleClipper",
]
