"""Drawing synthetic images: from the released Gaussians, or by the flow's Euler sampler.

Post-processing. Every draw is fresh, from a generator that the operating system seeds; labels go
round the declared classes, so that each appears equally often.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import PLAIN, SamplesWriter, read_samples, read_summary
from dpsynth.artifacts.sheet import contact_sheet, rows_by_class
from dpsynth.artifacts.spending import read_state
from dpsynth.console import note, progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.flow import VelocityField, euler
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import load_velocity
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.representation import Representation, load_representation
from dpsynth.released.card import stamps
from dpsynth.released.finishing import Finish, finish_of
from dpsynth.released.gaussians import load_mixture
from dpsynth.released.handout import hand_out

MODELS = ("release", "field", "model", "distilled", "prior", PLAIN)
"""What can be sampled: the Gaussians themselves, the flow of their analytic field, or a file;
`plain` is what the plan itself samples, without its augmentation."""
SHARD = 500

Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Codes (B, d) for labels (B,)."""
Pictures = Callable[[Tensor, torch.Generator], NDArray[np.uint8]]
"""Images (B, H, W, C) for labels (B,)."""


def sample(
    verified: VerifiedPlan,
    count: int | None = None,
    model: str | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Write `released/samples/`, a contact sheet and the hand-out folder around them.

    A plan that augments its images has them without augmentation too, in `samples-plain/`.

    Args:
        verified: the run to sample from.
        count: images in all; the plan's `sampling.count` if None.
        model: one of `MODELS`; the plan's own if None. Any other than the plan's own goes to
            `released/samples-MODEL/`, and is drawn alone.
        ranks: the processes that draw; the main one writes. The others return nothing.

    Raises:
        UsageError: an unknown model, `plain` where nothing is augmented, or a count below 1.
        MissingError: what the model is made of is not there yet.
    """
    plan, run = verified.plan, verified.run
    count = plan.sampling.count if count is None else count
    chosen = own_model(plan) if model is None else model
    ranks.lead(lambda: _check(plan, count, chosen))
    facts = _sample_one(verified, count, chosen, ranks)
    if model is None and plan.sampling.augment is not None:
        facts[PLAIN] = _sample_one(verified, count, PLAIN, ranks)
    if not ranks.is_main:
        return {}
    # The prior alone can be sampled before anything is spent: there is nothing to vouch for yet.
    handed = hand_out(run) if run.transcript.exists() else {}
    return {**facts, **handed}


def _sample_one(verified: VerifiedPlan, count: int, chosen: str, ranks: Ranks) -> dict[str, Any]:
    """One folder of samples with its contact sheet; {} but in the main process."""
    plan, run = verified.plan, verified.run
    suffix = "" if chosen == own_model(plan) else f"-{chosen}"
    folder = run.released / f"samples{suffix}"
    pictures, origin = ranks.main_first(lambda: _made_of(verified, count, chosen))
    ranks.require_same("what the samples are made of", repr(sorted(origin.items())))
    kept = ranks.tell({"kept": _is_kept(folder, origin)} if ranks.is_main else None)["kept"]
    if kept:
        note(f"{count} samples of this model are already there")
    else:
        _write(folder, verified, pictures, origin, ranks)
    return _shown(verified, folder, count, chosen, suffix) if ranks.is_main else {}


def _made_of(verified: VerifiedPlan, count: int, chosen: str) -> tuple[Pictures, dict[str, Any]]:
    """How the images are drawn, and their origin."""
    plan, run = verified.plan, verified.run
    representation = load_representation(run, plan)
    draw, origin = _drawer(verified, own_model(plan) if chosen == PLAIN else chosen)
    finish = finish_of(run, plan, augmented=chosen != PLAIN)
    origin |= {"count": count, "geometry_sha256": _geometry_hash(run), **finish.facts()}
    return _pictures(representation, draw, finish), origin


def _is_kept(folder: Path, origin: dict[str, Any]) -> bool:
    summary = read_summary(folder)
    return summary is not None and summary["origin"] == origin


def _shown(
    verified: VerifiedPlan, folder: Path, count: int, chosen: str, suffix: str
) -> dict[str, Any]:
    """Write the contact sheet; what there is to say of the samples."""
    plan, run = verified.plan, verified.run
    sheet = run.released / f"contact-sheet{suffix}.png"
    images, labels = read_samples(folder, plan.private.classes)
    rows = rows_by_class(images, labels, plan.private.classes)
    contact_sheet(rows, sheet, title=f"{plan.name}: synthetic", stamp=stamps(verified.lock))
    return {
        "samples": str(folder),
        "count": count,
        "model": chosen,
        "contact_sheet": str(sheet),
    }


def own_model(plan: Plan) -> str:
    """What the plan itself samples from: the release, or the last model that it makes."""
    if plan.sampling.method == "release":
        return "release"
    if plan.stages.train is not None:
        return "model"
    return "distilled" if plan.distillation is not None else "prior"


def _check(plan: Plan, count: int, model: str) -> None:
    if model not in MODELS:
        raise UsageError(
            f"there is no model {model!r} to sample", hint=f"--model {'|'.join(MODELS)}"
        )
    if model == PLAIN and plan.sampling.augment is None:
        raise UsageError(
            "the plan does not augment its samples: they are plain as they are",
            hint="leave --model out",
        )
    if count < 1:
        raise UsageError(f"{count} samples were asked for; expected at least 1", hint="-n 1000")


def _write(
    folder: Path,
    verified: VerifiedPlan,
    pictures: Pictures,
    origin: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Draw and write what is missing, shard by shard: one for each process, then the next."""
    plan, count = verified.plan, int(origin["count"])
    writer = None
    if ranks.is_main:
        writer = SamplesWriter(
            folder, plan.private.classes, origin=origin, stamp=stamps(verified.lock)
        )
    begun = ranks.tell(None if writer is None else {"written": writer.written})["written"]
    source = fresh_generator()
    with progress("sampling", count, completed=begun) as bar:
        for first in range(begun, count, SHARD * ranks.world):
            labels = _shard_labels(plan, count, first + SHARD * ranks.rank)
            drawn = pictures(labels, source).tobytes() if len(labels) else b""
            for rank, part in enumerate(ranks.gather(drawn)):
                labels = _shard_labels(plan, count, first + SHARD * rank)
                if writer is not None and len(labels):
                    writer.add(_images(part, plan), labels.numpy())
                    bar.advance(len(labels))
    if writer is not None:
        writer.finish()


def _shard_labels(plan: Plan, count: int, first: int) -> Tensor:
    """Labels of the shard that starts at image `first`; none beyond the last one."""
    return torch.arange(first, max(first, min(count, first + SHARD))) % len(plan.private.classes)


def _images(data: bytes, plan: Plan) -> NDArray[np.uint8]:
    """Images (n, H, W, C) of the plan's shape."""
    shape = plan.private.image
    flat = np.frombuffer(data, dtype=np.uint8)
    return flat.reshape(-1, shape.height, shape.width, shape.channels)


def _pictures(representation: Representation, draw: Draw, finish: Finish) -> Pictures:
    """Draw, decode and finish; rounded to bytes once, at the end."""

    def pictures(labels: Tensor, source: torch.Generator) -> NDArray[np.uint8]:
        decoded = representation.decode_pixels(draw(labels, source))
        return as_bytes(finish(decoded, source))

    return pictures


def fresh_generator() -> torch.Generator:
    """A generator seeded by the operating system. For post-processing: no secret rests on it."""
    source = torch.Generator()
    source.seed()
    return source


def _drawer(verified: VerifiedPlan, model: str) -> tuple[Draw, dict[str, Any]]:
    """How codes are drawn, and of what: the samples' origin."""
    plan, run = verified.plan, verified.run
    if model in {"release", "field"}:
        mixture, moments_hash = load_mixture(run, plan)
        origin = {"model": model, "moments_sha256": moments_hash}
        if model == "release":
            return mixture.draw, origin
        draw, facts = _flow(mixture.field, mixture.dim, plan)
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


def _geometry_hash(run: RunDir) -> str:
    return sha256_file(run.public / "geometry.safetensors")
