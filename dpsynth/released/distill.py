"""Distillation: teach the public prior the released analytic field (StraightDP section 3.1).

Post-processing of the moment release: no private record is read. Inputs are x_t = (1 - t) xi + t z
with z drawn from the released mixtures themselves, so that the student learns the field where its
own sampler will go. For t up to the horizon the teacher is the field, equation 3 for a class and
equation 4 for the null label; above it, the untouched prior (the paper replays public images there;
the prior is what remains of them in a run folder).
"""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.files import canonical_json, sha256_bytes, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import note, progress
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.flow import drop_labels, interpolate
from dpsynth.models.seeding import generator
from dpsynth.models.spectral import cap_of, cap_spectral
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import describe, load_for, save_velocity
from dpsynth.planning.allocation import horizon_of, trains_from
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Distillation
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.captions import drawn_captions
from dpsynth.public.measures import tau_of
from dpsynth.released.gaussians import ReleasedMixture, load_mixture

NULL_SHARE = 0.25
"""Share of inputs that teach the null branch: guidance leans on it as much as on the classes."""
EMA = 0.998
WARMUP = 0.02


def distilled_path(run: RunDir) -> Path:
    """Where the distilled velocity model lies."""
    return run.released / "distilled.safetensors"


def distill(verified: VerifiedPlan) -> dict[str, Any]:
    """Write `released/distilled.safetensors`, unless it is there for the same inputs.

    Of a plan of free captions the mixture's conditions are the captions that images are drawn for.

    Raises:
        UsageError: the plan declares no distillation.
        MissingError: the release or the prior is missing.
    """
    plan, run = verified.plan, verified.run
    settings = plan.distillation
    if settings is None:
        raise UsageError("the plan declares no distillation", hint="add a distillation: section")
    prior = run.public / "prior.safetensors"
    if not prior.exists():
        raise MissingError("the public prior is missing", hint="dpsynth pretrain RUN")
    mixture, moments_hash = load_mixture(run, plan)
    tau = tau_of(run, plan)
    horizon = horizon_of(settings, tau)
    made_of = {
        "moments_sha256": moments_hash,
        "prior_sha256": sha256_file(prior),
        "horizon": repr(horizon),
        "train_from": repr(trains_from(settings, tau)),
        "distillation": settings.model_dump_json(),
    }
    free = isinstance(plan.private.captions, FreeCaptions)
    captions = drawn_captions(plan) if free else None
    if captions is not None:
        made_of["captions_sha256"] = sha256_bytes(canonical_json({"captions": list(captions)}))
    path = distilled_path(run)
    facts = {"file": f"released/{path.name}", "horizon": horizon, "steps": settings.steps}
    if _is_done(path, plan, made_of):
        note("distillation: already done for this release")
        return {**facts, "sha256": sha256_file(path)}
    student, teacher = (load_for(prior, plan)[0] for _ in range(2))
    if captions is not None:
        describe(student, captions)
        describe(teacher, captions)
    averaged = teach(
        student, teacher, mixture, settings, horizon=horizon, source=generator(plan.public_seed)
    )
    save_velocity(averaged, path, plan.velocity, room="released", **made_of)
    return {**facts, "sha256": sha256_file(path)}


def teach(
    student: nn.Module,
    prior: nn.Module,
    mixture: ReleasedMixture,
    settings: Distillation,
    *,
    horizon: float,
    source: torch.Generator,
) -> nn.Module:
    """Fit `student` to the field up to `horizon` and to `prior` above; return its EMA.

    What is trainable of it learns: of a frozen prior its LoRA factors.
    """
    averaged, bound = deepcopy(student), cap_of(student)
    moving = [p for p in student.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(moving, settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: _rate(s, settings.steps))
    student.train()
    with one_thread(), progress("distillation", settings.steps) as bar:
        for step in range(settings.steps):
            inputs = _inputs(mixture, settings.batch, source)
            target = _target(mixture, prior, horizon, inputs)
            optimiser.zero_grad()
            (student(*inputs) - target).square().mean().backward()
            nn.utils.clip_grad_norm_(moving, 1.0)
            optimiser.step()
            cap_spectral(student, bound)
            schedule.step()
            _follow(averaged, student, min(EMA, (step + 1) / (step + 10)))
            bar.advance()
    cap_spectral(averaged, bound)
    return averaged.eval()


@torch.no_grad()
def _follow(averaged: nn.Module, student: nn.Module, decay: float) -> None:
    for mean, value in zip(averaged.parameters(), student.parameters(), strict=True):
        if value.requires_grad:
            mean.lerp_(value, 1 - decay)


def _inputs(
    mixture: ReleasedMixture, batch: int, source: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """x_t (B, d), t (B,), labels (B,), some of them null; every class equally often."""
    classes = torch.randint(mixture.classes, (batch,), generator=source)
    codes = mixture.draw(classes, source)
    noise = torch.randn(codes.shape, generator=source)
    t = torch.rand(batch, generator=source)
    labels = drop_labels(classes, NULL_SHARE, mixture.classes, source)
    return interpolate(codes, noise, t), t, labels


def _target(
    mixture: ReleasedMixture,
    prior: nn.Module,
    horizon: float,
    at: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Teacher's velocity (B, d) at x (B, d), t (B,), labels (B,)."""
    field = mixture.field(*at)
    if horizon >= 1.0:
        return field
    with torch.no_grad():
        replay: Tensor = prior(*at)
    return torch.where((at[1] <= horizon)[:, None], field, replay)


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


def _is_done(path: Path, plan: Plan, made_of: dict[str, str]) -> bool:
    if not path.exists():
        return False
    _, metadata = load_for(path, plan)
    return all(metadata.get(key) == value for key, value in made_of.items())
