"""The public prior: class-conditional rectified flow on public codes (StraightDP, Table 9)."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dpsynth.models.flow import drop_labels, flow_loss
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.schema import Prior
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
) -> nn.Module:
    """Train v(x, t, y) on public codes (n, d) by E |v(x_t, t, y) - (z - xi)|^2; return its EMA.

    Public labels (n,) are taken modulo `classes`: a private class starts from some public class,
    of which only the use of the label carries over. Dropped labels become the null label.
    """
    source = generator(seed)
    with seeded_initialisation(seed):
        model = build_velocity(velocity, codes.shape[1], classes)
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    own = labels % classes
    index = _endless(len(codes), settings.batch, source)
    for step in range(settings.steps):
        chosen = next(index)
        y = drop_labels(own[chosen], settings.label_dropout, classes, source)
        optimiser.zero_grad()
        loss = flow_loss(model, codes[chosen], y, generator=source)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        # A young average follows the model closely, or it would keep the random start.
        _average(averaged, model, min(settings.ema, (1 + step) / (10 + step)))
        advance()
    return averaged.eval()


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1.0 - decay)


def _endless(count: int, size: int, source: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from batches(count, size, source)
