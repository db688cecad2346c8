"""Public training of the autoencoder."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.models.autoencoder import (
    ConvAutoencoder,
    build_autoencoder,
    pixels,
    reconstruction_loss,
)
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.planning.schema import Autoencoder, ImageShape, Representation
from dpsynth.public.augment import seen
from dpsynth.public.perceptual import FeatureLoss

WARM_UP = 0.15
DRAWN_SHARE = 0.5


def autoencoder_steps(settings: Autoencoder, count: int) -> int:
    """How many optimiser steps the plan's epochs take over `count` public images."""
    return settings.epochs * max(1, count // settings.batch)


def fit_autoencoder(
    images: NDArray[np.uint8],
    settings: Representation,
    shape: ImageShape,
    *,
    seed: int,
    drawn: NDArray[np.bool_] | None = None,
    steps: int | None = None,
    perceived: FeatureLoss | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ConvAutoencoder:
    """Train on public bytes (n, H, W, C), each seen augmented; AdamW under one cycle.

    `drawn` (n,) says which images are letters or glyphs (None: none). `perceived` joins the pixel
    loss with the plan's weight. `advance` is called once a step, `steps` times:
    `autoencoder_steps` unless given.
    """
    options = settings.autoencoder
    steps = autoencoder_steps(options, len(images)) if steps is None else steps
    source = generator(seed)
    with seeded_initialisation(seed):
        model = build_autoencoder(settings, shape)
    model.train()
    optimiser = _optimiser(model, options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=options.learning_rate, total_steps=steps, pct_start=WARM_UP
    )
    data = torch.from_numpy(images)
    letters = torch.zeros(len(data), dtype=torch.bool) if drawn is None else torch.from_numpy(drawn)
    for index in islice(_batches(letters, options, source), steps):
        batch = seen(pixels(data[index]), options, source, letters[index])
        _step(model, batch, options, optimiser, source, perceived=perceived)
        schedule.step()
        advance()
    return model.eval()


def _optimiser(model: ConvAutoencoder, options: Autoencoder) -> torch.optim.Optimizer:
    # Fused updates round otherwise; nets of earlier plans stay what they were to the bit.
    return torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=1e-4, fused=options.norm
    )


def _batches(letters: Tensor, options: Autoencoder, source: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of indices (b,), epoch after epoch.

    With `deform` above 0 and both kinds of images there, half of each batch is letters, however
    many there are of either: both halves are drawn with replacement.
    """
    balanced = options.deform > 0 and bool(letters.any()) and not bool(letters.all())
    while not balanced:
        yield from batches(len(letters), options.batch, source)
    groups = [torch.nonzero(mask).flatten() for mask in (~letters, letters)]
    half = int(options.batch * DRAWN_SHARE)
    sizes = (options.batch - half, half)
    while True:
        chosen = [
            group[torch.randint(len(group), (size,), generator=source)]
            for group, size in zip(groups, sizes, strict=True)
        ]
        yield torch.cat(chosen)


def _step(
    model: ConvAutoencoder,
    batch: Tensor,
    options: Autoencoder,
    optimiser: torch.optim.Optimizer,
    source: torch.Generator,
    *,
    perceived: FeatureLoss | None,
) -> None:
    noise = options.latent_noise * torch.randn(len(batch), model.code, generator=source)
    optimiser.zero_grad()
    # Where the CPU has no bfloat16 of its own, torch emulates it: slower, and still right.
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bfloat16"):
        logits = model(batch, noise)
    loss = reconstruction_loss(logits.float(), batch, options.loss)
    if perceived is not None:
        loss = loss + options.perceptual * perceived(logits.float().sigmoid(), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
