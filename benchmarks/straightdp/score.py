"""What the tables measure of a folder of samples, by one protocol for every row.

Networks are trained on real data of the benchmark (MNIST is public); ceilings and floors come from
the same networks. FID stays blank: there are no Inception weights here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.straightdp.composed import (
    QUADRANTS,
    STROKES,
    Images,
    Labels,
    alone,
    compose,
    read,
)
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.assess.metrics import frechet_distance, precision_recall
from dpsynth.models.lenet import LeNet, accuracy, features, predict, train_probe, training_steps

PROBE_EPOCHS, FEATURE_STEPS = 10, 1_200
DOMAIN_STEPS, ATTRIBUTE_STEPS = 500, 800
NEIGHBOURS, MOST = 3, 5_000
"""Precision and recall: k, and how many images of each side (all pairs are compared)."""


@dataclass(frozen=True)
class Judge:
    """The references of one private set: held-out images, and networks trained on real images.

    images (n, 28, 28, 1), labels (n,); `net` tells classes and gives features, `known` (n, 84)
    those of the held-out images; `domain` tells private (1) from public (0).
    """

    images: Images
    labels: Labels
    net: LeNet
    domain: LeNet
    known: np.ndarray  # type: ignore[type-arg]

    @classmethod
    def kept(cls, work: Path, private: str = "mnist") -> "Judge":
        """The judge of a kind of private data; its networks are trained once for a work folder."""
        held, labels = real(private, "held-out", work)

        def train_net() -> LeNet:
            images, own = real(private, "train", work)
            return train_probe(images, own, 10, steps=FEATURE_STEPS)

        def train_domain() -> LeNet:
            fashion = read("fashion-mnist", "train")[0][:10_000, ..., None]
            both = np.concatenate([fashion, real(private, "train", work)[0][:10_000]])
            return train_probe(both, np.repeat([0, 1], 10_000), 2, steps=DOMAIN_STEPS)

        net = _kept(work / "judges" / f"{private}-classes.safetensors", 10, train_net)
        domain = _kept(work / "judges" / f"{private}-domain.safetensors", 2, train_domain)
        return cls(held, labels, net, domain, features(net, held))

    def score(
        self, images: Images, labels: Labels, seed: int = 0, *, whole: bool = True
    ) -> dict[str, float]:
        """Measures of samples (n, 28, 28, 1) that were drawn for `labels` (n,).

        Accuracy and Frechet distance; the rest if `whole`.
        """
        found = features(self.net, images)
        steps = training_steps(len(images), PROBE_EPOCHS)
        probe = train_probe(images, labels, 10, steps=steps, seed=seed)
        measured = {
            "accuracy": accuracy(probe, self.images, self.labels),
            "fd": frechet_distance(found, self.known),
        }
        return measured | (self._others(images, labels, found) if whole else {})

    def _others(
        self,
        images: Images,
        labels: Labels,
        found: np.ndarray,  # type: ignore[type-arg]
    ) -> dict[str, float]:
        precision, recall = precision_recall(found[:MOST], self.known[:MOST], NEIGHBOURS)
        return {
            "class_fd": self._by_class(found, labels),
            "consistency": float((predict(self.net, images) == labels).mean()),
            "domain": float((predict(self.domain, images) == 1).mean()),
            "precision": precision,
            "recall": recall,
        }

    def _by_class(self, found: np.ndarray, labels: Labels) -> float:  # type: ignore[type-arg]
        """Mean over classes of the Frechet distance inside the class."""
        distances = [
            frechet_distance(found[labels == y], self.known[self.labels == y]) for y in range(10)
        ]
        return float(np.mean(distances))


def real(private: str, side: str, work: Path) -> tuple[Images, Labels]:
    """Real images (n, 28, 28, 1) and labels (n,) of a kind of private data: train or held-out."""
    if private == "letters":
        name = work / "letters" / f"{side}.npz"
    elif private == "composed":
        name = work / "composed" / f"mnist-{'train' if side == 'train' else 't10k'}.npz"
    else:
        images, labels = read("mnist", "train" if side == "train" else "t10k")
        return images[..., None], labels
    with np.load(name) as kept:
        return kept["images"].reshape(-1, 28, 28, 1), kept["labels"].astype(np.int64)


def bounds(judge: Judge, private: str, work: Path, images: int) -> dict[str, dict[str, float]]:
    """Ceiling (real training images in the samples' place) and floor (public images)."""
    train, labels = real(private, "train", work)
    other, other_labels = read("fashion-mnist", "train")
    return {
        "ceiling": judge.score(train[:images], labels[:images]),
        "floor": judge.score(other[:images, ..., None], other_labels[:images]),
    }


def attributes(samples: Images, asked: dict[str, Labels], work: Path) -> dict[str, float]:
    """Share of samples whose class, stroke and quadrant are those that were asked for.

    A network for each attribute is trained on real composed digits, once for a work folder.
    """
    return {
        name: float((predict(_attribute(name, work), samples) == values).mean())
        for name, values in asked.items()
    }


def _attribute(name: str, work: Path) -> LeNet:
    values = {"class": 10, "quadrant": len(QUADRANTS), "stroke": len(STROKES)}[name]

    def train() -> LeNet:
        images, labels = read("mnist", "train")
        made, strokes, quadrants = compose(images[:20_000], 9)
        truth = {"class": labels[:20_000], "quadrant": quadrants, "stroke": strokes}[name]
        return train_probe(made[..., None], truth, values, steps=ATTRIBUTE_STEPS)

    return _kept(work / "judges" / f"composed-{name}.safetensors", values, train)


def _kept(path: Path, classes: int, train: Callable[[], LeNet]) -> LeNet:
    """The network of that file, or a fresh one, which is then kept there; one process trains it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_suffix(".lock")):
        if not path.exists():
            arrays = {name: tensor.numpy() for name, tensor in train().state_dict().items()}
            save_tensors(path, arrays, {"room": "public", "what": "LeNet of public images"})
    net = LeNet(classes, 1)
    arrays, _ = load_tensors(path)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return net.eval()
