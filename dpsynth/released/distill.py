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

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import note, progress
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.flow import drop_labels, interpolate
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import load_velocity, save_velocity
from dpsynth.planning.schema import Distillation, Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.gaussians import ReleasedMixture, load_mixture

NULL_SHARE = 0.25
"""Share of inputs that teach the null branch: guidance leans on it as much as on the classes."""
EMA = 0.998
WARMUP = 0.02
LATEST_HORIZON = 0.9
"""Private training always covers at least [0.9, 1)."""


def distilled_path(run: RunDir) -> Path:
    """Where the distilled velocity model lies."""
    return run.released / "distilled.safetensors"


def distill(verified: VerifiedPlan) -> dict[str, Any]:
    """Write `released/distilled.safetensors`, unless it is there for the same inputs.

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
    horizon = _horizon(settings, run)
    made_of = {
        "moments_sha256": moments_hash,
        "prior_sha256": sha256_file(prior),
        "horizon": repr(horizon),
        "train_from": repr(_train_from(horizon, run)),
        "distillation": settings.model_dump_json(),
    }
    path = distilled_path(run)
    facts = {"file": f"released/{path.name}", "horizon": horizon, "steps": settings.steps}
    if _is_done(path, plan, mixture.dim, made_of):
        note("distillation: already done for this release")
        return {**facts, "sha256": sha256_file(path)}
    student, _ = load_velocity(prior, plan.velocity, mixture.dim, mixture.classes)
    teacher, _ = load_velocity(prior, plan.velocity, mixture.dim, mixture.classes)
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
    """Fit `student` to the field up to `horizon` and to `prior` above; return its EMA."""
    averaged = deepcopy(student)
    optimiser = torch.optim.AdamW(student.parameters(), settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: _rate(s, settings.steps))
    student.train()
    with one_thread(), progress("distillation", settings.steps) as bar:
        for step in range(settings.steps):
            inputs = _inputs(mixture, settings.batch, source)
            target = _target(mixture, prior, horizon, inputs)
            optimiser.zero_grad()
            (student(*inputs) - target).square().mean().backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            _follow(averaged, student, min(EMA, (step + 1) / (step + 10)))
            bar.advance()
    return averaged.eval()


@torch.no_grad()
def _follow(averaged: nn.Module, student: nn.Module, decay: float) -> None:
    for mean, value in zip(averaged.parameters(), student.parameters(), strict=True):
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


def _horizon(settings: Distillation, run: RunDir) -> float:
    """The declared horizon, or the public cosine knee, capped."""
    if settings.horizon != "knee":
        return min(settings.horizon, settings.cap)
    return min(float(read_json(run.calibration)["tau"]), settings.cap)


def _train_from(horizon: float, run: RunDir) -> float:
    """Where private training begins: at the horizon, or at tau after a field taught for all t.

    So no private gradient targets what was taught already, unless everything was: then training
    covers what public data says no Gaussian field describes well.
    """
    if horizon < LATEST_HORIZON:
        return horizon
    return min(float(read_json(run.calibration)["tau"]), LATEST_HORIZON)


def _is_done(path: Path, plan: Plan, dim: int, made_of: dict[str, str]) -> bool:
    if not path.exists():
        return False
    _, metadata = load_velocity(path, plan.velocity, dim, len(plan.private.classes))
    return all(metadata.get(key) == value for key, value in made_of.items())
