"""A warm start on central images (DP-FETA, Li et al. 2025): they are learned before any record.

Post-processing of `released/central.safetensors`: DP-SGD then starts where a class already looks
like itself from afar.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpsynth.artifacts.central import NAME, ReleasedCentral, load_central
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.settled import require_calibration, require_settled
from dpsynth.artifacts.trained import cold_path, start_path
from dpsynth.console import note, progress
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.flow import drop_labels, flow_loss
from dpsynth.models.seeding import generator
from dpsynth.models.spectral import cap_spectral
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import load_for, save_velocity
from dpsynth.planning.central import WarmUp
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.prior import average, endless

_SEED = 8  # of the public seed's streams: those of `public.pretrain` come before


def warm_start(verified: VerifiedPlan) -> dict[str, Any]:
    """Write `released/warm.safetensors`, unless it is there for the same inputs.

    From the distilled model where the plan distils, else from the public prior; private training
    starts there (`artifacts.trained.start_path`).

    Raises:
        UsageError: the plan declares no central images.
        MissingError: the release or the model that it begins with is missing.
        ReplayError: the release is not what the run's transcript settled.
    """
    plan, run = verified.plan, verified.run
    stage, start = plan.stages.central, cold_path(run, verified.lock)
    if stage is None:
        raise UsageError("the plan has no central images", hint="declare stages.central in it")
    if not start.exists():
        step = "pretrain" if plan.distillation is None else "train"
        raise MissingError(f"{start.name} is missing", hint=typed("dpsynth", step, run.root))
    if not (run.released / NAME).exists():
        raise MissingError(
            "the central images come first", hint=typed("dpsynth", "release-central", run.root)
        )
    require_settled(run, [NAME])
    require_calibration(run)
    central = load_central(run.released / NAME)
    model, facts = load_for(start, plan)
    made_of = {
        "central_sha256": sha256_file(run.released / NAME),
        "start_sha256": sha256_file(start),
        "train_from": facts.get("train_from", repr(0.0)),
        "warm_up": stage.warm_up.model_dump_json(),
    }
    path = start_path(run, verified.lock)
    said = {"file": f"released/{path.name}", "steps": stage.warm_up.steps}
    if path.exists() and _is_of(load_for(path, plan)[1], made_of):
        note("warm start: already made of these central images")
        return {**said, "sha256": sha256_file(path)}
    with progress("warm start on central images", stage.warm_up.steps) as bar:
        warm = warm_up(
            model,
            central,
            stage.warm_up,
            classes=plan.private.conditions,
            seed=plan.public_seed + _SEED,
            spectral=plan.velocity.spectral,
            advance=bar.advance,
        )
    save_velocity(warm, path, plan.velocity, room="released", **made_of)
    return {**said, "sha256": sha256_file(path)}


def _is_of(metadata: dict[str, str], made_of: dict[str, str]) -> bool:
    return all(metadata.get(key) == value for key, value in made_of.items())


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
