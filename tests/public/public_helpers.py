"""A small plan over NPZ files, and a verified-plan stand-in, for the public tests."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dpsynth.artifacts.rooms import RunDir
from dpsynth.planning.schema import Plan


def small_plan(kind="pca", code=6, path=Path("public.npz"), **changes):
    settings = {
        "name": "small",
        "budget": {"epsilon": 3.0, "delta": 1e-5},
        "private": {
            "source": {"kind": "npz", "path": "/nonexistent/private.npz"},
            "capacity": 100,
            "image": {"height": 8, "width": 8},
            "classes": ["a", "b", "c"],
            "held_out": {"by": "hash", "fraction": 0.2},
        },
        "public": [{"kind": "npz", "path": str(path)}],
        "representation": {
            "kind": kind,
            "code": code,
            "autoencoder": {"width": 4, "epochs": 2, "batch": 32},
        },
        "stages": {"moments": {}},
        "velocity": {"kind": "mlp", "width": 16, "depth": 1},
        "prior": {"steps": 20, "batch": 32},
    }
    return Plan.model_validate({**settings, **changes})


def write_public(path, count=200, classes=4, seed=0):
    """Bars of random place and length, labelled by direction."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    data = np.zeros((count, 8, 8), dtype=np.uint8)
    for image, label in zip(data, labels, strict=True):
        row, start, length = draw.integers(0, 8), draw.integers(0, 3), draw.integers(3, 6)
        line = image if label % 2 else image.T
        line[row, start : start + length] = draw.integers(128, 256)
        if label >= 2:
            line[(row + 3) % 8, start : start + length] = 200
    np.savez(path, images=data, labels=labels)
    return path


def stand_in(plan, root):
    """What `pretrain` reads of a VerifiedPlan."""
    return SimpleNamespace(plan=plan, run=RunDir.create(root))
