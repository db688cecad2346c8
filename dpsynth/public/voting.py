"""Public feature spaces in which records vote for synthetic images (Private Evolution).

Each is a `Representation` that only encodes: its codes are the features, its radius the norm that
they are cut to. Votes cost the same in any of them; the radius is therefore a wide one, and public,
so that records and members are hardly ever cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.models.inception import WIDTH as INCEPTION_WIDTH
from dpsynth.models.inception import Inception
from dpsynth.models.lenet import WIDTH as LENET_WIDTH
from dpsynth.models.lenet import LeNet, features, train_probe
from dpsynth.models.threads import one_thread
from dpsynth.public.representation import Representation
from dpsynth.public.spool import in_parts

FORMAT = "dpsynth-vote-features-1"
NAME = "vote-features.safetensors"
WIDE = 2.0
"""The radius, over the largest norm of a public image's feature."""

Images = NDArray[np.uint8]
Features = Callable[[Images], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class FeatureCodec:
    """A network's features of images (n, H, W, C) as codes (n, d); nothing can be decoded."""

    features: Features
    dim: int
    elementwise: ClassVar[bool] = False

    def encode_rows(self, images: Images) -> NDArray[np.float64]:
        """Features (n, d): a forward pass for each record and no other, on one thread.

        As `AutoencoderCodec.encode_rows`: whom a record votes for must not depend on what lies
        beside it in a batch.
        """
        with one_thread():
            # Copied into memory that torch aligned: kernels may choose their sums' order by it.
            rows = [self.features(np.array(image, order="C")[None])[0] for image in images]
        return np.array(rows, np.float64).reshape(len(rows), self.dim)

    def encode_many(self, images: Images) -> Tensor:
        """Features (n, d) of public or synthetic images, in batches."""
        return torch.from_numpy(self.features(images))

    def decode(self, codes: Tensor) -> Tensor:
        """Raise UsageError: features are no images."""
        raise UsageError(f"features {tuple(codes.shape)} cannot be decoded: they are for votes")

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Nothing: the network has a file of its own."""
        return {}


def code_space(representation: Representation, images: Images) -> Representation:
    """Votes by distance of codes; `images` (n, H, W, C): public, for the radius."""
    return _widened(representation, images)


def lenet_space(net: LeNet, images: Images) -> Representation:
    """Votes by distance of a public LeNet's penultimate features; `images` as in `code_space`."""
    space = _space(lambda batch: features(net, batch), LENET_WIDTH, images.shape[1:])
    return _widened(space, images)


def inception_space(network: Inception, images: Images) -> Representation:
    """Votes by distance of FID's Inception features; `images` as in `code_space`.

    A pass for each record alone takes a large part of a second on a CPU.
    """
    return _widened(_space(network.features, INCEPTION_WIDTH, images.shape[1:]), images)


def inception_features(
    network: Inception, shape: tuple[int, int, int], radius: float
) -> Representation:
    """The space of `inception_space` for images of `shape` (H, W, C), its radius known already."""
    return replace(_space(network.features, INCEPTION_WIDTH, shape), radius=radius)


def train_features(
    images: Images, labels: NDArray[np.int64], classes: int, *, steps: int, seed: int
) -> LeNet:
    """The LeNet of `lenet_space`, trained on public images alone; arguments as `train_probe`."""
    with one_thread():
        return train_probe(images, labels, classes, steps=steps, seed=seed)


def save_features(path: Path, net: LeNet, radius: float, recipe: str = "") -> None:
    """Write the public network, and the radius of its space, atomically."""
    arrays = {name: value.contiguous().numpy() for name, value in net.state_dict().items()}
    facts = {"classes": str(net.classes), "channels": str(net.channels), "radius": repr(radius)}
    facts |= {"recipe": recipe} if recipe else {}
    save_tensors(path, arrays, {**facts, "format": FORMAT, "room": "public"})


def load_features(path: Path, shape: tuple[int, int, int]) -> Representation:
    """The space of a saved network for images of `shape` (H, W, C).

    Raises:
        MissingError: no such file.
        UsageError: damaged, or for images of other channels.
    """
    arrays, metadata = load_tensors(path)
    try:
        if metadata.get("format") != FORMAT or int(metadata["channels"]) != shape[2]:
            raise ValueError("it is for other images")
        net, radius = LeNet(int(metadata["classes"]), shape[2]), float(metadata["radius"])
        # load_state_dict copies into memory that torch aligned.
        net.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in arrays.items()})
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"{path.name} holds no vote features: {error}") from error
    net.eval()
    space = _space(lambda batch: features(net, batch), LENET_WIDTH, shape)
    return replace(space, radius=radius)


def _space(function: Features, dim: int, shape: tuple[int, ...]) -> Representation:
    height, width, channels = shape
    codec = FeatureCodec(function, dim)
    return Representation(codec, (height, width, channels), np.zeros(dim), 1.0, 1.0)


def _widened(space: Representation, images: Images) -> Representation:
    """The space with its radius `WIDE` times the largest norm of the public images' features."""
    largest = max((_norm(space, part) for part in in_parts(images)), default=0.0)
    if not largest > 0:
        raise UsageError("public images with features are needed to vote by")
    return replace(space, radius=WIDE * largest)


def _norm(space: Representation, images: Images) -> float:
    return float(space.encode(images).double().norm(dim=1).max())
