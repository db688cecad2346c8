"""The plan behind the table, and what its runs differ in."""

from pathlib import Path
from typing import Any

from benchmarks.frozen.checkpoint import PROMPT
from benchmarks.frozen.sizes import Size
from benchmarks.frozen.things import CLASSES

EPSILON = 2.0
SIGMA = 0.95
GUIDANCE = 2.0
MEANS = ("released", "zero", "random", "public")
"""The released mean, and what stands in its place in the controls."""
LEVELS = (0.80, 0.90, 0.92, 0.95, 0.98)
"""Levels at which sampling starts: the paper's from 0.90 to 0.98, and a lower one."""


def plan_of(prior: Path, private: Path, held_out: Path, size: Size) -> dict[str, Any]:
    """A plan of plain values: counts and sums of latents at epsilon 2, then guidance.

    Its records are public, as the plan says: the benchmark looks at them to measure.
    """
    channels, height, width = size.latent
    return {
        "version": 1,
        "name": "frozen-guide",
        "budget": {"epsilon": EPSILON, "delta": 1 / (2 * size.records)},
        "private": {
            "source": {"kind": "folder", "path": str(private)},
            "public": True,
            "capacity": size.records,
            "image": {"height": size.side, "width": size.side, "channels": 3},
            "classes": list(CLASSES),
            "held_out": {"by": "source", "source": {"kind": "folder", "path": str(held_out)}},
        },
        "public": [{"kind": "prior", "count": size.own}],
        "representation": {"kind": "latent", "clip_quantile": 0.95},
        "prior": {
            "kind": "diffusers",
            "model": str(prior),
            "latent": {"channels": channels, "height": height, "width": width},
            "prompt": PROMPT,
        },
        "stages": {
            "moments": {
                "covariance": "public",
                "groups": "auto",
                "projection": min(64, size.own // 2),
            }
        },
        "sampling": {
            "method": "guide",
            "start": round(1 - SIGMA, 6),
            "count": size.drawn,
            "steps": size.euler,
            "guidance": GUIDANCE,
        },
    }
