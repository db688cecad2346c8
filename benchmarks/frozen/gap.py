"""How much of the gap between the prior's mean and a private one samples close.

With p, q and a the means of the prior's samples, of private images and of guided samples, in
latents of the autoencoder or in pixels: `along` is (a - p).(q - p) / |q - p|^2, the way that was
gone in the right direction; `closed` is 1 - |a - q| / |p - q|, which counts what went elsewhere,
and the chance in a mean of few samples, against it. `agreement` is how often a classifier of public
images in any colour finds the class that was asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.frozen import autoencoder, things
from benchmarks.frozen.sizes import Size

Vectors = dict[str, NDArray[np.float64]]
SPACES = ("latents", "pixels")


@dataclass(frozen=True)
class Judge:
    """What samples are held against: the prior's mean, the private one, and a classifier."""

    vae: Any
    prior: Vectors
    private: Vectors
    probe: Any

    @classmethod
    def of(cls, vae: Any, prior: things.Images, private: things.Images, probe: Any) -> "Judge":
        """Take both means."""
        return cls(vae, means(vae, prior), means(vae, private), probe)

    def score(self, images: things.Images, labels: things.Labels) -> dict[str, float]:
        """`along` and `closed` in both spaces, and `agreement`."""
        from benchmarks.wavelet.judge import predicted

        found, own = {}, means(self.vae, images)
        for space in SPACES:
            p, q, a = self.prior[space], self.private[space], own[space]
            found[f"{space} along"] = along(a, p, q)
            found[f"{space} closed"] = closed(a, p, q)
        return found | {"agreement": float((predicted(self.probe, images) == labels).mean())}


def probe_of(size: Size) -> Any:
    """A LeNet trained on public clothes in any colour."""
    from dpsynth.models.lenet import train_probe

    grey, labels = things.clothes("train", slice(0, size.clothes))
    images = things.dyed(grey, things.STYLES["any"], seed=4, side=size.side)
    return train_probe(images, labels, len(things.CLASSES), steps=size.probing)


def means(vae: Any, images: things.Images) -> Vectors:
    """The mean latent and the mean image, flattened."""
    codes = autoencoder.latents(vae, images).flatten(1).double().mean(0)
    return {"latents": codes.numpy(), "pixels": (images.astype(float) / 255).mean(0).ravel()}


def along(a: NDArray[np.float64], p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Share of the way from p to q, measured along it.

    >>> along(np.array([1.0, 5.0]), np.array([0.0, 0.0]), np.array([2.0, 0.0]))
    0.5
    """
    return float((a - p) @ (q - p) / ((q - p) @ (q - p)))


def closed(a: NDArray[np.float64], p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Share of the distance from p to q that is gone at a; below 0 where a is farther off than p.

    >>> closed(np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([2.0, 0.0]))
    0.5
    """
    return float(1 - np.linalg.norm(a - q) / np.linalg.norm(p - q))


def samples_in(folder: Path) -> tuple[things.Images, things.Labels]:
    """Images and labels of an image folder, in the order of its `metadata.csv`."""
    import csv

    from PIL import Image

    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    images = np.stack([np.asarray(Image.open(folder / row["file_name"])) for row in rows])
    return images, np.array([things.CLASSES.index(row["label"]) for row in rows])
