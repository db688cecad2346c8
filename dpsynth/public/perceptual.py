"""A loss in features of public images: what a pixel loss blurs, a small classifier still tells.

A decoder that is trained on squared pixel errors answers doubt with grey. Johnson, Alahi and
Fei-Fei (2016) compare images by the activations of a classifier beside; here that classifier is a
LeNet trained on the plan's own public images, so that nothing is downloaded and no private image
has a say.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsynth.console import progress
from dpsynth.errors import DataError
from dpsynth.models.lenet import LeNet, train_probe
from dpsynth.planning.schema import Autoencoder
from dpsynth.public.sources import PublicImages

STEPS = 1_200
"""Optimiser steps of the classifier: enough for its first two layers to settle."""
_LEAST = 1e-8  # no activation at all: nothing to compare


@dataclass(frozen=True, eq=False)
class FeatureLoss:
    """Mean squared difference of the first two activation maps of `net`, each over its own size."""

    net: LeNet

    def __call__(self, drawn: Tensor, images: Tensor) -> Tensor:
        """Loss () of drawn images against the true ones, both (n, C, H, W) in [0, 1]."""
        with torch.no_grad():
            wanted = self.net.maps(images)
        total = drawn.new_zeros(())
        for found, true in zip(self.net.maps(drawn), wanted, strict=True):
            size = true.square().mean().clamp_min(_LEAST)
            total = total + (found - true).square().mean() / size
        return total


def feature_loss(public: PublicImages, settings: Autoencoder, seed: int) -> FeatureLoss | None:
    """The loss of a classifier trained on all public images; None where the plan asks for none.

    Raises:
        DataError: the public images have one class, so that no classifier can be trained.
    """
    if settings.perceptual <= 0:
        return None
    if public.classes < 2:
        raise DataError(
            "representation.autoencoder.perceptual needs public images of at least two classes",
            hint="add a public source (such as {kind: glyphs}), or set perceptual: 0",
        )
    with progress("representation: features of public images", STEPS) as bar:
        net = train_probe(
            public.images,
            public.labels,
            public.classes,
            steps=STEPS,
            seed=seed,
            progress=bar.advance,
        )
    net.zero_grad(set_to_none=True)
    return FeatureLoss(net.requires_grad_(False))
