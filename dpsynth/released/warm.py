"""A warm start on central images (DP-FETA, Li et al. 2025): they are learned before any record.

Post-processing of `released/central.safetensors`: DP-SGD then starts where a class already looks
like itself from afar.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn

from dpsynth.artifacts.central import ReleasedCentral
from dpsynth.errors import UsageError
from dpsynth.models.flow import drop_labels, flow_loss
from dpsynth.models.seeding import generator
from dpsynth.models.spectral import cap_spectral
from dpsynth.models.threads import one_thread
from dpsynth.planning.central import WarmUp
from dpsynth.public.prior import average, endless


@one_thread()
def warm_up(
    start: nn.Module,
    central: ReleasedCentral,
    settings: WarmUp,
    *,
    classes: int,
    seed: int,
    spectral: float | None = None,
    advance: Callable[[], None] = lambda: None,
) -> nn.Module:
    """The average of `start` fine-tuned on the central images; `start` itself stays as it is.

    Minimises E ||v(x_t, t, y) - (z - xi)||^2 / d for t uniform on [0, horizon), z a central image
    as released, noise and all.

    Args:
        start: a velocity model v(x, t, y), such as the public prior, or one with new weights.
        central: what was released; its labels are the model's.
        settings: of the plan.
        classes: the model's null label.
        seed: public; no secret rests on it.
        spectral: the cap of the plan's velocity model, if it has one.
        advance: called after each step.

    Raises:
        UsageError: central images of another number of classes.
    """
    if central.sums.shape[1] != classes:
        raise UsageError(f"central images are of {central.sums.shape[1]} classes, not {classes}")
    codes = torch.from_numpy(central.codes).float()
    labels, source = torch.from_numpy(central.labels), generator(seed)
    model = copy.deepcopy(start).train().requires_grad_(True)
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    index = endless(len(codes), settings.batch, source)
    for step in range(settings.steps):
        chosen = next(index)
        y = drop_labels(labels[chosen], settings.label_dropout, classes, source)
        optimiser.zero_grad()
        loss = flow_loss(model, codes[chosen], y, generator=source, high=settings.horizon)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        cap_spectral(model, spectral)
        average(averaged, model, min(settings.ema, (1 + step) / (10 + step)))
        advance()
    return averaged.eval()
