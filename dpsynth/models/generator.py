"""A small conditional generator: noise and a class in, an image out, by a multilayer perceptron."""

import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import UsageError
from dpsynth.models.seeding import seeded_initialisation

FORMAT, NAME = "dpsynth-generator-1", "generator.safetensors"
Shape = tuple[int, int, int]


class ImageGenerator(nn.Module):
    """Fully connected layers with ReLU and a sigmoid at the end.

    Batch normalisation before each ReLU (`norm`), as in DP-MERF's own code, takes several times the
    learning rate that the plain layers bear.

    Args:
        shape: H, W, C of an image.
        classes: declared number of classes Y; 1 for images without labels.
        latent: numbers of noise L that an image is made of.
        hidden: widths of the hidden layers.
        norm: whether these have batch normalisation.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        latent: int,
        hidden: tuple[int, ...],
        *,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.classes, self.latent, self.hidden = shape, classes, latent, hidden
        self.norm = norm
        layers: list[nn.Module] = []
        for size, following in pairwise((latent + classes, *hidden)):
            layers.append(nn.Linear(size, following))
            layers += [nn.BatchNorm1d(following), nn.ReLU()] if norm else [nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Linear(hidden[-1], math.prod(shape)))

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, H, W) in (0, 1) of noise (B, L) and labels (B,)."""
        given = functional.one_hot(labels, self.classes).to(noise.dtype)
        height, width, channels = self.shape
        made: Tensor = self.body(torch.cat([noise, given], dim=1)).sigmoid()
        return made.view(-1, channels, height, width)


def new_generator(
    shape: Shape,
    classes: int,
    latent: int,
    hidden: tuple[int, ...],
    seed: int,
    *,
    norm: bool = False,
) -> ImageGenerator:
    """A generator with initial weights that follow from `seed`."""
    with seeded_initialisation(seed):
        return ImageGenerator(shape, classes, latent, hidden, norm=norm)


def save_generator(path: Path, model: ImageGenerator, **made_of: str) -> None:
    """Write the generator atomically as a released file; `made_of`: what it was fitted to."""
    facts = {
        "shape": list(model.shape),
        "classes": model.classes,
        "latent": model.latent,
        "hidden": list(model.hidden),
        "norm": model.norm,
    }
    arrays = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    metadata = {"format": FORMAT, "room": "released", "generator": json.dumps(facts), **made_of}
    save_tensors(path, arrays, metadata)


def load_generator(path: Path) -> tuple[ImageGenerator, dict[str, str]]:
    """Read a generator, and what its file says of itself.

    Raises:
        MissingError: none was fitted yet.
        UsageError: the file is damaged, of another format, or not a released one.
    """
    arrays, metadata = load_release(path, FORMAT, by="train")
    try:
        facts = json.loads(metadata["generator"])
        height, width, channels = (int(side) for side in facts["shape"])
        hidden = tuple(int(size) for size in facts["hidden"])
        model = ImageGenerator(
            (height, width, channels),
            int(facts["classes"]),
            int(facts["latent"]),
            hidden,
            norm=bool(facts["norm"]),
        )
        model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{path.name} is damaged: {error}", hint="fit it again") from error
    return model.eval(), metadata
