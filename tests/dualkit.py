"""Backbones away from their zero output, small enough for exact comparisons."""

import torch
from torch import Tensor, nn

from dpsynth.models.mmdit import DualStreamVelocity
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.velocity import TextStream, Velocity

CAPTIONS = ["a thin three", "bold seven", "one"]
CLASSES = len(CAPTIONS)
TEXT = TextStream(width=6, length=4, vocabulary=64)
PLAIN = {"kind": "mmdit", "width": 8, "depth": 3, "heads": 2, "text": TEXT}
CONSTRAINTS = {
    "plain": {},
    "clamp": {"clamp": 2.0},
    "late": {"late": 1},
    "late-2": {"late": 2},
    "decoupled": {"decoupled": True},
    "spectral": {"spectral": 0.7},
    "all": {"clamp": 2.0, "late": 1, "decoupled": True, "spectral": 0.7},
    "all-2": {"clamp": 2.0, "late": 2, "decoupled": True, "spectral": 0.7},
}
IMAGE = ImageShape(height=5, width=4)
SPACES = {"code": (11, None), "image": (20, IMAGE)}


def settings(constraint: str = "plain", **more: object) -> Velocity:
    """A tiny backbone under one of `CONSTRAINTS`."""
    return Velocity.model_validate({**PLAIN, **CONSTRAINTS[constraint], **more})


def model(
    constraint: str = "plain", space: str = "code", scale: float = 1.0, **more: object
) -> DualStreamVelocity:
    """The backbone in float64 with random weights everywhere."""
    dim, image = SPACES[space]
    with seeded_initialisation(0):
        made = DualStreamVelocity(
            dim, CLASSES, settings(constraint, **more), captions=CAPTIONS, image=image
        )
        nn.init.normal_(made.leave.weight)
        nn.init.normal_(made.leave.bias)
    for parameter in made.parameters():
        parameter.data.mul_(scale)
    return made.double()


def inputs(space: str = "code", draws: int = 3, batch: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, K, d), t (B, K), labels (B,), the null label among them."""
    source, dim = generator(1), SPACES[space][0]
    x = torch.randn(batch, draws, dim, generator=source, dtype=torch.float64)
    t = torch.rand(batch, draws, generator=source, dtype=torch.float64)
    return x, t, torch.arange(batch) % (CLASSES + 1)
