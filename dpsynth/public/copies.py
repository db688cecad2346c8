"""Public images beside their altered copies: drawn, encoded, and shown."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.sheet import contact_sheet
from dpsynth.models.autoencoder import as_bytes, pixels
from dpsynth.models.seeding import generator
from dpsynth.planning.schema import Plan
from dpsynth.public.augment import seen
from dpsynth.public.representation import Representation
from dpsynth.public.sources import PublicImages
from dpsynth.public.spool import spooled

Images = NDArray[np.uint8]

SHEET_IMAGES = 16
_PART, _NUMBERS = 2_000, 2**23


def altered(plan: Plan, public: PublicImages) -> Iterator[Images]:
    """One altered copy of every public image, as the autoencoder's training sees it, by parts.

    The same each time it is called.
    """
    source = generator(plan.public_seed + 3)
    settings = plan.representation.autoencoder
    images, drawn = torch.from_numpy(public.images), torch.from_numpy(public.drawn)
    for start in range(0, len(images), _PART):
        part = slice(start, start + _PART)
        yield as_bytes(seen(pixels(images[part]), settings, source, drawn[part]))


def augmented(plan: Plan, public: PublicImages) -> Images:
    """One altered copy of every public image (n, H, W, C); on disk if they are many."""
    return spooled(altered(plan, public), public.images.shape[1:], np.uint8)


def codes_of(representation: Representation, *images: Images) -> Tensor:
    """Codes (n, d) float32 of these arrays of images, one after another; on disk if they are many.

    Encoded in parts of `_PART`, of long codes fewer, and not as they lie on disk: so a code's bits
    do not hang on that.
    """
    size = max(1, min(_PART, _NUMBERS // representation.dim))
    parts = (
        representation.encode(array[start : start + size]).numpy()
        for array in images
        for start in range(0, len(array), size)
    )
    return torch.from_numpy(spooled(parts, (representation.dim,), np.float32))


def show(
    plan: Plan,
    public: PublicImages,
    copies: Images | None,
    representation: Representation,
    path: Path,
) -> None:
    """Public images, plain and altered if they are, above what the code space makes of them."""
    source = generator(plan.public_seed)
    chosen = torch.randperm(len(public.images), generator=source)[:SHEET_IMAGES].numpy()
    rows = []
    altered = [] if copies is None else [("altered", copies[chosen])]
    for title, images in (("public", public.images[chosen]), *altered):
        rows += [(title, images), ("rebuilt", representation.decode(representation.encode(images)))]
    contact_sheet(rows, path, title="Public images and their reconstructions")
