"""Drawing synthetic images: from the released Gaussians, or by the flow's Euler sampler.

The flow starts from noise or, where the plan guides, from the tilted marginal of what was released
(`released.guidance`). Post-processing. Every draw is fresh, from a generator that the operating
system seeds; labels go round the declared classes, or the fillings of a caption template, so that
each appears equally often.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import PLAIN, SamplesWriter, read_samples, read_summary
from dpsynth.artifacts.sheet import contact_sheet, rows_by_class
from dpsynth.console import counted, note, progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import UsageError
from dpsynth.models.autoencoder import as_bytes
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.representation import Representation, load_representation
from dpsynth.released.asked import Asked, asked_of
from dpsynth.released.card import stamps
from dpsynth.released.drawing import Draw, Route, drawer
from dpsynth.released.finishing import Finish, finish_of
from dpsynth.released.guidance import Guide
from dpsynth.released.handout import hand_out

MODELS = ("release", "field", "model", "distilled", "prior", PLAIN)
"""What can be sampled: the Gaussians themselves, the flow of their analytic field, or a file;
`plain` is what the plan itself samples, without its augmentation."""
SHARD = 500

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
    facts = _sample_one(verified, count, _route(plan, chosen), ranks)
    if model is None and plan.sampling.augment is not None:
        facts[PLAIN] = _sample_one(verified, count, _route(plan, PLAIN), ranks)
    return _handed(run, facts) if ranks.is_main else {}


def sample_by(
    verified: VerifiedPlan, count: int | None, route: Route, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """As `sample`, of one route that is not the plan's own; it is drawn alone."""
    count = verified.plan.sampling.count if count is None else count
    ranks.lead(lambda: _check_count(count))
    facts = _sample_one(verified, count, route, ranks)
    return _handed(verified.run, facts) if ranks.is_main else {}


def _handed(run: RunDir, facts: dict[str, Any]) -> dict[str, Any]:
    # The prior alone can be sampled before anything is spent: there is nothing to vouch for yet.
    handed = hand_out(run) if run.transcript.exists() else {}
    return {**facts, **handed}


def _route(plan: Plan, chosen: str) -> Route:
    """The plan's own route for its own model and for `plain`; any other model from noise."""
    own = own_model(plan)
    return Route(
        model=own if chosen == PLAIN else chosen,
        name=chosen,
        suffix="" if chosen == own else f"-{chosen}",
        guide=Guide() if plan.sampling.method == "guide" and chosen in {own, PLAIN} else None,
        augmented=chosen != PLAIN,
    )


def _sample_one(verified: VerifiedPlan, count: int, route: Route, ranks: Ranks) -> dict[str, Any]:
    """One folder of samples with its contact sheet; {} but in the main process."""
    folder = verified.run.released / f"samples{route.suffix}"
    asked = ranks.main_first(lambda: asked_of(verified.plan))
    pictures, origin = ranks.main_first(lambda: _made_of(verified, count, route, asked))
    ranks.require_same("what the samples are made of", repr(sorted(origin.items())))
    kept = ranks.tell({"kept": _is_kept(folder, origin)} if ranks.is_main else None)["kept"]
    if kept:
        are = "is" if count == 1 else "are"
        note(f"{counted(count, 'sample')} of this model {are} already there")
    else:
        _write(folder, verified, pictures, asked, origin, ranks=ranks)
    return _shown(verified, folder, count, route) if ranks.is_main else {}


def _made_of(
    verified: VerifiedPlan, count: int, route: Route, asked: Asked
) -> tuple[Pictures, dict[str, Any]]:
    """How the images are drawn, and their origin."""
    plan, run = verified.plan, verified.run
    representation = load_representation(run, plan)
    draw, origin = drawer(verified, route, asked)
    finish = finish_of(run, plan, augmented=route.augmented)
    origin |= {"count": count, "geometry_sha256": _geometry_hash(run), **finish.facts()}
    return _pictures(representation, draw, finish), origin


def own_origin(verified: VerifiedPlan, count: int) -> dict[str, Any]:
    """Origin of so many samples of the plan's own, were they drawn of the files that are there now.

    Raises MissingError: what they are made of is not there.
    """
    plan = verified.plan
    return _made_of(verified, count, _route(plan, own_model(plan)), asked_of(plan))[1]


def _is_kept(folder: Path, origin: dict[str, Any]) -> bool:
    summary = read_summary(folder)
    return summary is not None and summary["origin"] == origin


def _shown(verified: VerifiedPlan, folder: Path, count: int, route: Route) -> dict[str, Any]:
    """Write the contact sheet; what there is to say of the samples."""
    plan, run = verified.plan, verified.run
    sheet = run.released / f"contact-sheet{route.suffix}.png"
    images, labels = read_samples(folder, plan.private.classes)
    rows = rows_by_class(images, labels, plan.private.classes)
    title = f"{plan.name}: synthetic" + route.suffix.replace("-", ", ", 1)
    contact_sheet(rows, sheet, title=title, stamp=stamps(verified.lock))
    return {
        "samples": str(folder),
        "count": count,
        "model": route.name,
        "contact_sheet": str(sheet),
    }


def own_model(plan: Plan) -> str:
    """What the plan itself samples from: the release, or the last model that it makes."""
    return "release" if plan.sampling.method == "release" else last_model(plan)


def last_model(plan: Plan) -> str:
    """The last velocity model that the plan makes."""
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
    _check_count(count)


def _check_count(count: int) -> None:
    if count < 1:
        raise UsageError(f"{count} samples were asked for; expected at least 1", hint="-n 1000")


def _write(
    folder: Path,
    verified: VerifiedPlan,
    pictures: Pictures,
    asked: Asked,
    origin: dict[str, Any],
    *,
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
            labels = _shard_labels(asked, count, first + SHARD * ranks.rank)
            drawn = pictures(labels, source).tobytes() if len(labels) else b""
            for rank, part in enumerate(ranks.gather(drawn)):
                labels = _shard_labels(asked, count, first + SHARD * rank)
                if writer is not None and len(labels):
                    texts = [asked.captions[y] for y in labels.tolist()]
                    writer.add(_images(part, plan), asked.classes[labels.numpy()], texts)
                    bar.advance(len(labels))
    if writer is not None:
        writer.finish()


def _shard_labels(asked: Asked, count: int, first: int) -> Tensor:
    """Labels of the shard that starts at image `first`; none beyond the last one."""
    return torch.arange(first, max(first, min(count, first + SHARD))) % asked.count


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


def _geometry_hash(run: RunDir) -> str:
    return sha256_file(run.public / "geometry.safetensors")
