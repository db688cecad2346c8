"""What the emoji table measures: distances to private images in a public classifier's features.

The classifier is a LeNet that tells Twemoji's ten groups apart; it has seen no private image.
FD is the Frechet distance of its 84 features. The distance by caption is LPIPS-style (Zhang et
al. 2018, eq. 1, without learned heads): activations of both convolutions, each place scaled to
norm 1, squared differences averaged over places and summed over layers, between a sample and the
private image of the same caption.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.straightdp.composed import alone
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.assess.metrics import frechet_distance
from dpsynth.assess.perceptual import Perceptual, caption_pairs
from dpsynth.models.lenet import Images, LeNet, features, to_tensor, train_probe

STEPS = 1_500
PART = 500
MOST = 4_000
"""More pairs than there are captions: all are compared."""


@dataclass(frozen=True)
class Captioned:
    """Images uint8 (n, H, W, C) with a caption and a label each."""

    images: Images
    texts: tuple[str, ...]
    labels: NDArray[np.int64]

    def rows(self, chosen: NDArray[np.int64]) -> "Captioned":
        """Those of these places."""
        texts = tuple(self.texts[place] for place in chosen)
        return Captioned(self.images[chosen], texts, self.labels[chosen])


class Distance(nn.Module):
    """The LPIPS-style distance (B,) of images (B, C, H, W) in [-1, 1], as `Perceptual` asks."""

    def __init__(self, net: LeNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Sum over both layers of the mean over places of the squared difference of directions."""
        total = first.new_zeros(len(first))
        maps = (self.net.maps((images + 1) / 2) for images in (first, second))
        for ours, theirs in zip(*maps, strict=True):
            gap = _direction(ours) - _direction(theirs)
            total = total + gap.square().sum(1).mean(dim=(1, 2))
        return total


@dataclass(frozen=True)
class Judge:
    """The public classifier and the private images that samples are held against."""

    net: LeNet
    private: Captioned
    known: NDArray[np.float64]

    @classmethod
    def kept(cls, path: Path, public: Captioned, private: Captioned, classes: int) -> "Judge":
        """Train the classifier on public images, once for a work folder."""
        net = _net(path, public, classes)
        return cls(net, private, features(net, private.images))

    def score(self, samples: Captioned, seed: int = 0) -> dict[str, float]:
        """FD to the private images, and the mean distance to those of the same caption.

        `agreement`: how often the classifier finds the group that was asked for.
        """
        found = features(self.net, samples.images)
        return {
            "fd": frechet_distance(found, self.known),
            "distance": self.by_caption(samples, seed),
            "agreement": float((predicted(self.net, samples.images) == samples.labels).mean()),
        }

    def by_caption(self, samples: Captioned, seed: int = 0) -> float:
        """Mean LPIPS-style distance over pairs of one caption, `seed` draws among several."""
        pairs = caption_pairs(samples.texts, self.private.texts, most=MOST, seed=seed)
        perceptual = Perceptual(Distance(self.net), "LPIPS-style, LeNet of public images")
        ours, theirs = samples.images[pairs[:, 0]], self.private.images[pairs[:, 1]]
        return float(perceptual.distances(ours, theirs).mean())

    def bounds(self, public: Captioned, count: int, seed: int = 0) -> dict[str, dict[str, float]]:
        """Ceiling: `count` private images against the other ones. Floor: public, same captions.

        No caption has two private images: in the ceiling's place stands `unrelated`, the distance
        of private images to those of other captions, which is worse than any floor.
        """
        order = np.random.default_rng(seed).permutation(len(self.private.texts))
        some, others = order[:count], order[count:]
        texts = set(self.private.texts)
        shared = np.array([row for row, text in enumerate(public.texts) if text in texts])
        floor = public.rows(shared[np.random.default_rng(seed).permutation(len(shared))[:count]])
        own = self.private.rows(some)
        shuffled = Captioned(np.roll(own.images, 1, axis=0), own.texts, own.labels)
        return {
            "ceiling": {"fd": frechet_distance(self.known[some], self.known[others])},
            "floor": self.score(floor),
            "unrelated": {"distance": self.by_caption(shuffled)},
        }


def predicted(net: LeNet, images: Images) -> NDArray[np.int64]:
    """The group (n,) that the classifier finds."""
    with torch.no_grad():
        parts = (images[start : start + PART] for start in range(0, len(images), PART))
        return np.concatenate([net(to_tensor(part)).argmax(dim=1).numpy() for part in parts])


def _direction(maps: Tensor) -> Tensor:
    """Activations (B, C, h, w), each place scaled to norm 1 over channels."""
    return maps / (maps.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _net(path: Path, public: Captioned, classes: int) -> LeNet:
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_suffix(".lock")):
        if not path.exists():
            net = train_probe(public.images, public.labels, classes, steps=STEPS)
            arrays: dict[str, Any] = {k: v.numpy() for k, v in net.state_dict().items()}
            save_tensors(path, arrays, {"room": "public", "what": "LeNet of public emoji"})
    net = LeNet(classes, public.images.shape[3])
    arrays, _ = load_tensors(path)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return net.eval()
