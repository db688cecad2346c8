"""Drawing synthetic images: from the released Gaussians, or by the flow's Euler sampler.

Post-processing. Every draw is fresh, from a generator that the operating system seeds; labels go
round the declared classes, so that each appears equally often.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import SamplesWriter, read_samples, read_summary
from dpsynth.artifacts.sheet import contact_sheet, rows_by_class
from dpsynth.console import note, progress
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.flow import VelocityField, euler
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import load_velocity
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.representation import Representation, load_representation
from dpsynth.released.card import stamps
from dpsynth.released.gaussians import load_gaussians
from dpsynth.released.handout import hand_out

MODELS = ("release", "field", "model", "distilled", "prior")
"""What can be sampled: the Gaussians themselves, the flow of their analytic field, or a file."""
SHARD = 500

Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Codes (B, d) for labels (B,)."""


def sample(
    verified: VerifiedPlan, count: int | None = None, model: str | None = None
) -> dict[str, Any]:
    """Write `released/samples/`, a contact sheet and the hand-out folder around them.

    Args:
        verified: the run to sample from.
        count: images in all; the plan's `sampling.count` if None.
        model: one of `MODELS`; the plan's own if None. Any other than the plan's own goes to
            `released/samples-MODEL/`.

    Raises:
        UsageError: an unknown model, or a count below 1.
        MissingError: what the model is made of is not there yet.
    """
    plan, run = verified.plan, verified.run
    count = plan.sampling.count if count is None else count
    own = own_model(plan)
    chosen = own if model is None else model
    _check(count, chosen)
    suffix = "" if chosen == own else f"-{chosen}"
    folder = run.released / f"samples{suffix}"
    representation = load_representation(run, plan)
    draw, origin = _drawer(verified, chosen)
    origin = {**origin, "count": count, "geometry_sha256": _geometry_hash(run)}
    summary = read_summary(folder)
    if summary is not None and summary["origin"] == origin:
        note(f"{count} samples of this model are already there")
    else:
        _write(folder, verified, representation, draw, origin)
    sheet = run.released / f"contact-sheet{suffix}.png"
    images, labels = read_samples(folder, plan.private.classes)
    rows = rows_by_class(images, labels, plan.private.classes)
    contact_sheet(rows, sheet, title=f"{plan.name}: synthetic", stamp=stamps(verified.lock))
    # The prior alone can be sampled before anything is spent: there is nothing to vouch for yet.
    handed = hand_out(run) if run.transcript.exists() else {}
    return {
        "samples": str(folder),
        "count": count,
        "model": chosen,
        "contact_sheet": str(sheet),
        **handed,
    }


def own_model(plan: Plan) -> str:
    """What the plan itself samples from: the release, or the last model that it makes."""
    if plan.sampling.method == "release":
        return "release"
    if plan.stages.train is not None:
        return "model"
    return "distilled" if plan.distillation is not None else "prior"


def _check(count: int, model: str) -> None:
    if model not in MODELS:
        raise UsageError(
            f"there is no model {model!r} to sample", hint=f"--model {'|'.join(MODELS)}"
        )
    if count < 1:
        raise UsageError(f"{count} samples were asked for; expected at least 1", hint="-n 1000")


def _write(
    folder: Path,
    verified: VerifiedPlan,
    representation: Representation,
    draw: Draw,
    origin: dict[str, Any],
) -> None:
    """Draw, decode and write what is missing, shard by shard."""
    classes, count = verified.plan.private.classes, int(origin["count"])
    writer = SamplesWriter(folder, classes, origin=origin, stamp=stamps(verified.lock))
    source = fresh_generator()
    with progress("sampling", count, completed=writer.written) as bar:
        while writer.written < count:
            first, last = writer.written, min(count, writer.written + SHARD)
            labels = torch.arange(first, last) % len(classes)
            writer.add(representation.decode(draw(labels, source)), labels.numpy())
            bar.advance(last - first)
    writer.finish()


def fresh_generator() -> torch.Generator:
    """A generator seeded by the operating system. For post-processing: no secret rests on it."""
    source = torch.Generator()
    source.seed()
    return source


def _drawer(verified: VerifiedPlan, model: str) -> tuple[Draw, dict[str, Any]]:
    """How codes are drawn, and of what: the samples' origin."""
    plan, run = verified.plan, verified.run
    if model in {"release", "field"}:
        gaussians, moments_hash = load_gaussians(run, plan)
        origin = {"model": model, "moments_sha256": moments_hash}
        if model == "release":
            return gaussians.draw, origin
        draw, facts = _flow(gaussians.field, gaussians.dim, plan)
        return draw, {**origin, **facts}
    path = _model_path(run, model)
    dim = load_representation(run, plan).dim
    velocity, _ = load_velocity(path, plan.velocity, dim, len(plan.private.classes))
    draw, facts = _flow(velocity, dim, plan)
    return draw, {"model": model, "model_sha256": sha256_file(path), **facts}


def _flow(velocity: VelocityField, dim: int, plan: Plan) -> tuple[Draw, dict[str, Any]]:
    settings, null = plan.sampling, len(plan.private.classes)

    def draw(labels: Tensor, source: torch.Generator) -> Tensor:
        start = torch.randn(len(labels), dim, generator=source)
        with one_thread():
            return euler(
                velocity, start, labels, null=null, steps=settings.steps, guidance=settings.guidance
            )

    return draw, {"steps": settings.steps, "guidance": settings.guidance}


def _model_path(run: RunDir, model: str) -> Path:
    path = (run.public if model == "prior" else run.released) / f"{model}.safetensors"
    if not path.exists():
        step = "pretrain" if model == "prior" else "train"
        raise MissingError(
            f"{path.parent.name}/{path.name} is not there yet", hint=f"dpsynth {step} RUN"
        )
    return path


def _geometry_hash(run: RunDir) -> str:
    return sha256_file(run.public / "geometry.safetensors")
