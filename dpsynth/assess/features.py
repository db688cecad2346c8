"""Named feature spaces, and a cache of what is made from real records (curator-only).

A cache file's name is a hash of everything that decides its content, the records' own bytes
included: data that changed in place never meets an old value.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.files import canonical_json, read_json, write_json
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import DpsynthError
from dpsynth.models import lenet
from dpsynth.models.inception import Inception
from dpsynth.models.lenet import Images, Labels, LeNet

VERSION = 1
"""Part of every cache key: raise it when a protocol changes."""


@dataclass(frozen=True)
class FeatureSpace:
    """A feature map with the name under which its values are reported.

    Attributes:
        name: what made the features, in words.
        key: content hash of the network.
        width: feature dimension d.
        features: images uint8 (n, H, W, C) to float64 (n, d).
        slow: whether features of real images are worth keeping on disk.
    """

    name: str
    key: str
    width: int
    features: Callable[[Images], NDArray[np.float64]]
    slow: bool = False

    @property
    def short(self) -> str:
        """The name without what stands in brackets: "lenet-84"."""
        return self.name.split(" (")[0]


def content_hash(*parts: Any) -> str:
    """SHA-256 over arrays (shape, type and bytes) and plain JSON values, in order."""
    digest = hashlib.sha256()
    for part in (VERSION, *parts):
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(canonical_json(part))
    return digest.hexdigest()


def lenet_space(
    images: Images,
    labels: Labels,
    classes: int,
    *,
    steps: int,
    cache: Path | None,
    progress: Callable[[int], None] | None = None,
    of: str = "real records",
) -> tuple[FeatureSpace, LeNet]:
    """The built-in features: penultimate layer of a LeNet trained on the real training records.

    Curator-only where these are private: the network knows them. It is kept in `cache`.

    Args:
        images: real training images uint8 (n, H, W, C).
        labels: their labels (n,).
        classes: declared number of classes.
        steps: optimiser steps.
        cache: folder in the curator's room; None keeps nothing.
        progress: called with 1 after each step, and once with all of them on a cache hit.
        of: what the images are, for the space's name.
    """
    key = content_hash("lenet-84", images, labels, classes, steps, list(images.shape[1:]))
    path = None if cache is None else cache / f"lenet-{key[:32]}.safetensors"
    net = None if path is None else _load_net(path, classes, images.shape[3])
    if net is None:
        net = lenet.train_probe(images, labels, classes, steps=steps, progress=progress)
        arrays = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
        if path is not None:
            save_tensors(path, arrays, {"room": "curator", "what": "LeNet trained on real records"})
    elif progress is not None:
        progress(steps)
    name = f"lenet-{lenet.WIDTH} (penultimate layer, trained on {of} for {steps} steps)"
    return FeatureSpace(name, key, lenet.WIDTH, partial(lenet.features, net)), net


def kept_features(space: FeatureSpace, images: Images, cache: Path | None) -> NDArray[np.float64]:
    """Features (n, d) of real images, kept on disk where the network is slow and there is a cache.

    Networks compute in float32, so that is what is stored: nothing is lost.
    """
    if not space.slow or cache is None:
        return space.features(images)
    path = cache / f"features-{content_hash(space.key, images)[:32]}.safetensors"
    try:
        arrays, _ = load_tensors(path)
        return arrays["features"].astype(np.float64)
    except (DpsynthError, KeyError):  # absent or damaged: made anew
        made = space.features(images)
        save_tensors(path, {"features": made.astype(np.float32)}, {"room": "curator"})
        return made


def inception_space(network: Inception, key: str) -> FeatureSpace:
    """FID's Inception features; `key` is the hash of the weights file."""
    from dpsynth.models.inception import WIDTH

    return FeatureSpace(network.name, key, WIDTH, network.features, slow=True)


def remembered(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `path` holds, or else what `make` returns, which is then kept there."""
    try:
        return read_json(path)
    except DpsynthError:  # absent or damaged: made anew
        value = make()
        write_json(path, value, mode=0o600)
        return value


def _load_net(path: Path, classes: int, channels: int) -> LeNet | None:
    try:
        arrays, _ = load_tensors(path)
        net = LeNet(classes, channels)
        net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except (DpsynthError, RuntimeError):  # absent, damaged or of another shape: trained anew
        return None
    return net.eval()
