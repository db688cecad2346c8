"""The public prior: class-conditional rectified flow on public codes (StraightDP, Table 9)."""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dpsynth.models.flow import drop_labels, flow_loss
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.models.spectral import cap_spectral
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import build_velocity, describe
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.training import Prior
from dpsynth.planning.velocity import Velocity


@one_thread()
def fit_prior(
    codes: Tensor,
    labels: Tensor,
    velocity: Velocity,
    settings: Prior,
    classes: int,
    *,
    seed: int,
    advance: Callable[[], None] = lambda: None,
    captions: Sequence[str] | None = None,
    image: ImageShape | None = None,
    captions_of: Sequence[str] | None = None,
) -> nn.Module:
    """Train v(x, t, y) on public codes (n, d) by E |v(x_t, t, y) - (z - xi)|^2; return its EMA.

    Public labels (n,) are taken modulo `classes`: a private class starts from some public class,
    of which only the use of the label carries over. Dropped labels become the null label.

    `captions`, `image`: of the model, as in `build_velocity`. `captions_of`: a caption of each
    public image, from which the backbone's caption stream learns in place of the labels; labels
    of the model that is returned mean `captions` all the same. The constraints of section 3.3
    hold from the start: imposed afterwards they break a model.
    """
    source = generator(seed)
    with seeded_initialisation(seed):
        model = build_velocity(velocity, codes.shape[1], classes, captions=captions, image=image)
    cap_spectral(model, velocity.spectral)
    own, null = labels % classes, classes
    if captions_of is not None:
        own, null = _described(model, captions_of)
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    index = endless(len(codes), settings.batch, source)
    for step in range(settings.steps):
        chosen = next(index)
        y = drop_labels(own[chosen], settings.label_dropout, null, source)
        optimiser.zero_grad()
        loss = flow_loss(model, codes[chosen], y, generator=source)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        cap_spectral(model, velocity.spectral)
        # A young average follows the model closely, or it would keep the random start.
        average(averaged, model, min(settings.ema, (1 + step) / (10 + step)))
        advance()
    cap_spectral(averaged, velocity.spectral)
    if captions_of is not None:
        describe(averaged, None)
    return averaged.eval()


def _described(model: nn.Module, captions: Sequence[str]) -> tuple[Tensor, int]:
    """Labels (n,) that mean these captions (n) to the model, and its null label now.

    An image without a caption has the null label.
    """
    distinct = sorted(set(captions) - {""})
    places = {caption: place for place, caption in enumerate(distinct)}
    describe(model, distinct)
    null = len(distinct)
    return torch.tensor([places.get(caption, null) for caption in captions]), null


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the model's: an exponential moving average."""
    for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1.0 - decay)


def endless(count: int, size: int, source: torch.Generator) -> Iterator[Tensor]:
    """Batches of indices (size,), epoch after epoch, each in an order of its own."""
    while True:
        yield from batches(count, size, source)
