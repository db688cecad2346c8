"""Public training of the autoencoder."""

from collections.abc import Callable

import numpy as np
import torch
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

WARM_UP = 0.15


def autoencoder_steps(settings: Autoencoder, count: int) -> int:
    """How many optimiser steps the plan's epochs take over `count` public images."""
    return settings.epochs * max(1, count // settings.batch)


def fit_autoencoder(
    images: np.ndarray,
    settings: Representation,
    shape: ImageShape,
    *,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> ConvAutoencoder:
    """Train on public bytes (n, H, W, C), each seen augmented; AdamW under one cycle.

    `advance` is called once a step, `autoencoder_steps` times.
    """
    options = settings.autoencoder
    source = generator(seed)
    with seeded_initialisation(seed):
        model = build_autoencoder(settings, shape)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        max_lr=options.learning_rate,
        total_steps=autoencoder_steps(options, len(images)),
        pct_start=WARM_UP,
    )
    data = torch.from_numpy(images)
    for _ in range(options.epochs):
        for index in batches(len(images), options.batch, source):
            batch = seen(pixels(data[index]), options, source)
            _step(model, batch, options.latent_noise, optimiser, source)
            schedule.step()
            advance()
    return model.eval()


def _step(
    model: ConvAutoencoder,
    batch: Tensor,
    latent_noise: float,
    optimiser: torch.optim.Optimizer,
    source: torch.Generator,
) -> None:
    noise = latent_noise * torch.randn(len(batch), model.code, generator=source)
    optimiser.zero_grad()
    loss = reconstruction_loss(model(batch, noise), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
