"""How codes are drawn: from the released Gaussians, or by the Euler sampler of some field.

The flow starts from noise or, guided, from the tilted marginal of what was released
(`released.guidance`). Post-processing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.files import canonical_json, sha256_bytes, sha256_file
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import read_state
from dpsynth.errors import MissingError
from dpsynth.models.flow import VelocityField, euler
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import describe, load_for
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.asked import Asked
from dpsynth.released.gaussians import load_mixture
from dpsynth.released.guidance import (
    Guide,
    TiltedStart,
    control_means,
    guide_facts,
    own_means,
)

Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Codes (B, d) for labels (B,)."""


@dataclass(frozen=True)
class Route:
    """One folder of samples: what they are drawn from, and how.

    model: release, field, model, distilled or prior; name: what people call it; suffix: of its
    folder's name; guide: starts the flow from the release, None from noise; augmented: whether
    images are moved where the plan says so.
    """

    model: str
    name: str
    suffix: str = ""
    guide: Guide | None = None
    augmented: bool = True


def drawer(verified: VerifiedPlan, route: Route, asked: Asked) -> tuple[Draw, dict[str, Any]]:
    """How codes are drawn, and of what: the samples' origin."""
    plan, run, model = verified.plan, verified.run, route.model
    if model in {"release", "field"}:
        mixture, moments_hash = load_mixture(run, plan)
        origin = {"model": model, "moments_sha256": moments_hash, **caption_facts(plan, asked)}
        if model == "release":
            return mixture.draw, origin
        draw, facts = flow_draw(mixture.field, plan, asked)
        return draw, {**origin, **facts}
    path = model_path(run, model)
    velocity = _model(path, plan, asked)
    origin = {"model": model, "model_sha256": sha256_file(path), **caption_facts(plan, asked)}
    if route.guide is None:
        draw, facts = flow_draw(velocity, plan, asked)
        return draw, {**origin, **facts}
    start, t0, told = _tilted(verified, route.guide, asked)
    draw, facts = flow_draw(velocity, plan, asked, start, t0)
    return draw, {**origin, **facts, **told}


def _model(path: Path, plan: Plan, asked: Asked) -> nn.Module:
    """The plan's model of that file; for free captions its labels mean those asked for."""
    velocity, _ = load_for(path, plan)
    if isinstance(plan.private.captions, FreeCaptions):
        describe(velocity, asked.captions)
    return velocity


def caption_facts(plan: Plan, asked: Asked) -> dict[str, str]:
    """What the origin says of free captions: their hash. Other plans' facts say them."""
    if not isinstance(plan.private.captions, FreeCaptions):
        return {}
    return {"captions_sha256": sha256_bytes(canonical_json({"captions": asked.captions}))}


def _tilted(
    verified: VerifiedPlan, guide: Guide, asked: Asked
) -> tuple[TiltedStart, float, dict[str, Any]]:
    """Where guided samples start, when, and what their origin says of it."""
    plan, run = verified.plan, verified.run
    t0 = guide.at(run, plan)
    mixture, moments_hash = load_mixture(run, plan)
    means = None
    if guide.mean == "public" and plan.frozen is not None:
        means = own_means(run, plan)
    elif guide.mean != "released":
        prior = _model(model_path(run, "prior"), plan, asked)
        means = control_means(guide.mean, mixture, prior, plan)
    return TiltedStart(mixture, t0, means), t0, guide_facts(guide, t0, moments_hash)


def flow_draw(
    velocity: VelocityField, plan: Plan, asked: Asked, start: Draw | None = None, t0: float = 0.0
) -> tuple[Draw, dict[str, Any]]:
    """The Euler sampler from points of `start` at t0, and what a sample's origin says of it.

    From noise at 0 where there is no start.
    """
    settings, dim = plan.sampling, plan.representation.code

    def draw(labels: Tensor, source: torch.Generator) -> Tensor:
        begun = (
            torch.randn(len(labels), dim, generator=source)
            if start is None
            else start(labels, source)
        )
        with one_thread():
            return euler(
                velocity,
                begun,
                labels,
                null=asked.count,
                steps=settings.steps,
                guidance=settings.guidance,
                start_time=t0,
            )

    return draw, {"steps": settings.steps, "guidance": settings.guidance}


def model_path(run: RunDir, model: str) -> Path:
    """The file of a model that is not the Gaussians. Raises MissingError where it is not there."""
    path = (run.public if model == "prior" else run.released) / f"{model}.safetensors"
    if not path.exists():
        if model == "model" and _closed_early(run):
            raise MissingError(
                "this run was closed before its training ended: there is no model",
                hint="dpsynth sample RUN --model release, distilled or prior",
            )
        step = "pretrain" if model == "prior" else "train"
        raise MissingError(
            f"{path.parent.name}/{path.name} is not there yet", hint=f"dpsynth {step} RUN"
        )
    return path


def _closed_early(run: RunDir) -> bool:
    """Whether a run that was to train is closed: without a model, it was closed before its end."""
    lock = read_lock(run.lock)
    return bool(lock.stage_slots("train")) and read_state(run, lock).closed
