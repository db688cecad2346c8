"""The sharpening gain that public images support.

Samples are decoded draws of a Gaussian mixture, and those are softer than reconstructions: the gain
is measured on draws of the public classes' own Gaussians.
"""

import numpy as np
import torch
from torch import Tensor

from dpsynth.models.autoencoder import pixels
from dpsynth.models.finish import gain_for
from dpsynth.models.seeding import generator
from dpsynth.public.representation import Representation
from dpsynth.public.sources import PublicImages

MOST_IMAGES = 5_000


def source_gains(representation: Representation, public: PublicImages, seed: int) -> list[float]:
    """For each public source, the gain in [0, 4] that gives its decoded draws its images' energy.

    Energy is the gradient energy of `models.finish`, over at most `MOST_IMAGES` of the source; as
    many draws come from one Gaussian for each of its classes, fitted to those images' codes. The
    smallest of these gains is never sharper than every public source supports: a source that the
    decoder blurs more than others (photographs under a decoder of strokes) asks for a gain that
    overdoes the edges of the rest, and private images may be like any of them.
    """
    draw, gains = generator(seed), []
    for number in range(len(public.sources)):
        own = np.flatnonzero(public.source == number)
        chosen = own[torch.randperm(len(own), generator=draw)[:MOST_IMAGES].numpy()]
        images = public.images[chosen]
        labels = torch.from_numpy(public.labels[chosen])
        drawn = class_draws(representation.encode(images), labels, draw)
        decoded = representation.decode_pixels(drawn).float()
        gains.append(gain_for(decoded, pixels(torch.from_numpy(images))))
    return gains


def class_draws(codes: Tensor, labels: Tensor, draw: torch.Generator) -> Tensor:
    """As many draws (n, d) as codes (n, d), each of the Gaussian of its class, `labels` (n,)."""
    drawn = torch.empty_like(codes)
    for label in np.unique(labels.numpy()).tolist():
        mine = labels == label
        own = codes[mine].double()
        centred = own - own.mean(0)
        values, basis = torch.linalg.eigh(centred.T @ centred / len(own))
        normal = torch.randn(own.shape, generator=draw, dtype=torch.float64)
        drawn[mine] = (own.mean(0) + normal * values.clamp_min(0).sqrt() @ basis.T).float()
    return drawn
