"""LPIPS between samples and real images of the same caption, with weights that the user has.

As in DP-Wavelet, sec. 4: "the average perceptual distance between ground truth images and
generated samples conditioned on the same text prompt", each image with its first caption. The
metric is Zhang et al. (2018), version 0.1 on AlexNet, from their package `lpips`; nothing is ever
downloaded: the network comes from a file, the linear heads from the package's own or from a file.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.artifacts.files import sha256_file
from dpsynth.assess.bootstrap import LEVEL, Interval, mean_interval
from dpsynth.errors import MissingError, UsageError

Images = NDArray[np.uint8]
WEIGHTS = "alexnet-owt-7be5be79.pth"
"""torchvision's AlexNet."""
OFFICIAL = "7be5be79"
"""First digits of the SHA-256 of those weights; torch hub names files so."""
SIDE = 64
"""Shorter side, in pixels, to which smaller images are enlarged: that of the patches on which LPIPS
was fitted. AlexNet has no last layer for images of 28 pixels."""
MOST = 1000
BATCH = 64
MANY = 30
"""Captions from which on they are resampled whole; fewer count as fixed, such as classes."""
FIXED = "percentile bootstrap of pairs; captions and networks are fixed"
NO_WEIGHTS = (
    "LPIPS left blank: there are no AlexNet weights, and none are ever downloaded. Name "
    f"torchvision's {WEIGHTS} with --lpips-weights."
)


@dataclass(frozen=True)
class Perceptual:
    """A loaded LPIPS and what it is: `name` goes into the report beside every value."""

    net: nn.Module
    name: str

    def distances(self, first: Images, second: Images) -> NDArray[np.float64]:
        """LPIPS (n,) of image pairs uint8 (n, H, W, 1 or 3); 0 for equal images.

        Grey is copied to three channels and pixels are scaled to [-1, 1]; images with a side below
        `SIDE` are enlarged (bilinear, corners not aligned) until their shorter side has it.

        Raises:
            UsageError: the two arrays differ in shape.
        """
        if first.shape != second.shape or first.ndim != 4:
            raise UsageError(
                f"image pairs are {first.shape} and {second.shape}, expected one shape"
            )
        out = np.empty(len(first))
        with torch.no_grad():
            for start in range(0, len(first), BATCH):
                rows = slice(start, start + BATCH)
                pair = _prepared(first[rows]), _prepared(second[rows])
                out[rows] = self.net(*pair).flatten().numpy()
        return out


@dataclass(frozen=True)
class PerceptualScore:
    """LPIPS by caption pairs: lower is closer.

    Attributes:
        mean: over the pairs.
        interval: of the mean.
        pairs: how many.
        captions: how many captions have a pair.
        unmatched: captions of samples that no reference image has.
    """

    mean: float
    interval: Interval
    pairs: int
    captions: int
    unmatched: int


def find_backbone(named: Path | None) -> Path | None:
    """AlexNet's weights: `named`, else torch's hub cache, else None (`NO_WEIGHTS` is the note).

    Raises:
        MissingError: `named` is not there.
    """
    if named is not None:
        if not named.is_file():
            raise MissingError(f"no AlexNet weights at {named}", hint=f"give PATH/{WEIGHTS}")
        return named
    cached = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    return cached if cached.is_file() else None


def load_perceptual(backbone: Path, heads: Path | None = None) -> Perceptual:
    """LPIPS 0.1 on AlexNet from weights on disk (tensors alone are unpickled).

    Args:
        backbone: torchvision's AlexNet state, keys `features.N.weight` and `.bias`.
        heads: the five linear layers, keys `linN.model.1.weight`; None: those that the package
            `lpips` brings along.

    Raises:
        MissingError: `lpips` is not installed, or a file is not there.
        UsageError: a file holds something else.
    """
    own = _package() / "weights" / "v0.1" / "alex.pth"
    heads = heads or own
    features, linear = (
        _read(path, what) for path, what in ((backbone, "AlexNet"), (heads, "LPIPS"))
    )
    net = _bare()
    try:
        with torch.no_grad():
            for key, tensor in net.state_dict().items():
                if key.startswith("net."):
                    tensor.copy_(_fitting(features, key.split(".", 2)[2], "features.", tensor))
                elif key.startswith("lin") and not key.startswith("lins."):
                    tensor.copy_(_fitting(linear, key, "", tensor))
    except (KeyError, AttributeError) as error:
        raise UsageError(
            f"{backbone} and {heads} do not hold the weights of AlexNet and of LPIPS 0.1 on it",
            hint=f"use torchvision's {WEIGHTS} and lpips's weights/v0.1/alex.pth",
        ) from error
    digest = sha256_file(backbone)
    official = digest.startswith(OFFICIAL) and heads == own
    origin = "torchvision and lpips weights" if official else "FOREIGN weights"
    return Perceptual(net.eval(), f"lpips 0.1 alex ({origin} {digest[:8]})")


def caption_pairs(
    samples: Sequence[str], reference: Sequence[str], *, most: int = MOST, seed: int = 0
) -> NDArray[np.int64]:
    """Pairs (p, 2) of a sample's and a reference image's index with equal captions.

    Within a caption both sides are shuffled and paired off, so each image is in one pair at most;
    of more than `most` pairs as many are drawn at random.

    >>> caption_pairs(["a", "b"], ["b", "c", "b"])[:, 0].tolist()
    [1]
    """
    rng = np.random.default_rng(seed)
    ours, theirs = _by_caption(samples), _by_caption(reference)
    pairs: list[NDArray[np.int64]] = [np.empty((0, 2), dtype=np.int64)]
    for caption in sorted(ours.keys() & theirs.keys()):
        left, right = rng.permutation(ours[caption]), rng.permutation(theirs[caption])
        count = min(len(left), len(right))
        pairs.append(np.stack([left[:count], right[:count]], axis=1))
    found = np.concatenate(pairs)
    if len(found) > most:
        found = found[np.sort(rng.choice(len(found), most, replace=False))]
    return found


def lpips_by_caption(
    samples: Images,
    sample_captions: Sequence[str],
    reference: Images,
    reference_captions: Sequence[str],
    perceptual: Perceptual,
    *,
    most: int = MOST,
    level: float = LEVEL,
    seed: int = 0,
) -> PerceptualScore:
    """Mean LPIPS over pairs of a sample and a real image with one caption.

    Without captions the class names stand in their place; the value then says how far images of a
    class lie from each other, and is worth little without its ceiling (real images in the samples'
    place): two real images of one class are far apart as well.

    Args:
        samples: uint8 (n, H, W, C).
        sample_captions: n texts, the first caption of each image.
        reference: uint8 (m, H, W, C).
        reference_captions: m texts.
        perceptual: the loaded network.
        most: most pairs.
        level: two-sided confidence.
        seed: of the pairing and of the resampling.

    Raises:
        UsageError: captions do not fit the images, sizes differ, or no caption is on both sides.
    """
    if len(samples) != len(sample_captions) or len(reference) != len(reference_captions):
        raise UsageError("each image needs one caption for LPIPS")
    pairs = caption_pairs(sample_captions, reference_captions, most=most, seed=seed)
    if not len(pairs):
        raise UsageError("no LPIPS: no caption of the samples is one of the reference's")
    values = perceptual.distances(samples[pairs[:, 0]], reference[pairs[:, 1]])
    names = np.array([sample_captions[i] for i in pairs[:, 0]])
    captions = len(np.unique(names))
    interval = mean_interval(values, names if captions >= MANY else None, level=level, seed=seed)
    if captions < MANY:
        interval = Interval(interval.low, interval.high, level, interval.resamples, FIXED)
    unmatched = len(set(sample_captions) - set(reference_captions))
    return PerceptualScore(float(values.mean()), interval, len(pairs), captions, unmatched)


def _by_caption(captions: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, caption in enumerate(captions):
        found.setdefault(caption, []).append(index)
    return found


def _package() -> Path:
    """Where the package `lpips` lies."""
    try:
        import lpips
    except ImportError as error:
        raise MissingError(
            "LPIPS needs the package lpips, which is not installed",
            hint='pip install -e ".[torch]"',
        ) from error
    return Path(lpips.__file__).parent


def _bare() -> nn.Module:
    """LPIPS with fresh weights, so that nothing is fetched."""
    import lpips

    with warnings.catch_warnings():  # it calls torchvision in a way that is deprecated there
        warnings.simplefilter("ignore")
        net: nn.Module = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
    return net


def _read(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise MissingError(f"no {what} weights at {path}", hint="give the path of a weights file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, zip and key errors
        raise UsageError(f"{path} does not hold {what} weights") from error
    return state


def _fitting(state: dict[str, Any], key: str, prefix: str, like: Tensor) -> Tensor:
    """The tensor `prefix + key`; KeyError where it is absent or has another shape."""
    found: Tensor = state[prefix + key]
    if found.shape != like.shape:
        raise KeyError(key)
    return found


def _prepared(images: Images) -> Tensor:
    """Float (B, 3, H', W') in [-1, 1]."""
    moved = np.moveaxis(images, 3, 1).astype(np.float32, order="C")
    pixels = (torch.from_numpy(moved) / 127.5 - 1).expand(-1, 3, -1, -1)
    height, width = pixels.shape[2:]
    least = min(height, width)
    if least >= SIDE:
        return pixels
    size = (max(SIDE, height * SIDE // least), max(SIDE, width * SIDE // least))
    return functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
