"""Drawing synthetic images: from the released Gaussians, or by the flow's Euler sampler.

The flow starts from noise or, where the plan guides, from the tilted marginal of what was released
(`released.guidance`). Post-processing. Every draw is fresh, from a generator that the operating
system seeds; labels go round the declared classes, or the fillings of a caption template, so that
each appears equally often.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import PLAIN, read_samples, read_summary
from dpsynth.artifacts.sheet import COLUMNS, ROWS, contact_sheet, rows_by_class
from dpsynth.console import counted, note
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import UsageError
from dpsynth.models.autoencoder import as_bytes
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.representation import Representation, load_representation
from dpsynth.released.asked import Asked, asked_of
from dpsynth.released.card import stamps
from dpsynth.released.drawing import Draw, Route, drawer
from dpsynth.released.drawn import Drawn, Made, Pictures, write
from dpsynth.released.finishing import Finish, finish_of
from dpsynth.released.generating import MODEL as GENERATOR
from dpsynth.released.generating import generator_pictures
from dpsynth.released.guidance import Guide
from dpsynth.released.handout import hand_out
from dpsynth.released.members import load_members
from dpsynth.released.spectral import token_pictures

POPULATION = "population"
MODELS = ("release", "field", "model", "distilled", "prior", PLAIN)
"""What can be sampled: the Gaussians themselves, the flow of their analytic field, or a file;
`plain` is what the plan itself samples, without its augmentation."""
TOKEN_MODELS = ("model", "prior")
"""What can be sampled of a plan of kind tokens."""
GENERATOR_MODELS = (GENERATOR, PLAIN)
"""What can be sampled of a plan that releases an embedding."""
POPULATION_MODELS = (POPULATION, "prior", PLAIN)
"""What can be sampled of a plan whose records vote."""


def sample(
    verified: VerifiedPlan,
    count: int | None = None,
    model: str | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Write `released/samples/`, a contact sheet and the hand-out folder around them.

    Of a plan with spectral tokens they are coarse, in `released/coarse/`: `complete_wavelet` makes
    `released/samples/` of them. In raster order there is nothing to complete.

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
    folder = verified.run.released / folder_name(verified.plan, route)
    asked = ranks.main_first(lambda: asked_of(verified.plan))
    made = ranks.main_first(lambda: _made_of(verified, count, route, asked))
    ranks.require_same("what the samples are made of", repr(sorted(made.origin.items())))
    kept = ranks.tell({"kept": is_kept(folder, made.origin)} if ranks.is_main else None)["kept"]
    if kept:
        are = "is" if count == 1 else "are"
        note(f"{counted(count, 'sample')} of this model {are} already there")
    else:
        write(folder, verified, made, asked, source=fresh_generator(), ranks=ranks)
    return _shown(verified, folder, count, route) if ranks.is_main else {}


def folder_name(plan: Plan, route: Route) -> str:
    """The folder in `released/`: `coarse` for samples that `complete-wavelet` goes on from.

    The untouched prior of a plan on tokens draws whole images at once.
    """
    whole = plan.learns_tokens and route.model == "prior"
    return ("coarse" if plan.is_completed and not whole else "samples") + route.suffix


def _made_of(verified: VerifiedPlan, count: int, route: Route, asked: Asked) -> Made:
    """How the images are drawn, and their origin."""
    plan, run = verified.plan, verified.run
    if plan.stages.embedding is not None:
        return generator_pictures(verified, count, route, asked)
    if plan.learns_tokens:
        return token_pictures(verified, count, route, asked)
    representation = load_representation(run, plan)
    finish = finish_of(run, plan, augmented=route.augmented)
    told = {"count": count, "geometry_sha256": _geometry_hash(run), **finish.facts()}
    if route.model == POPULATION:
        members, origin = load_members(run, plan)

        def placed(first: int) -> Pictures:
            draw = partial(members.codes, first=first)
            return _pictures(representation, lambda y, source: draw(y, source=source), finish)

        return Made(placed(0), origin | told, placed=placed)
    draw, origin = drawer(verified, route, asked)
    return Made(_pictures(representation, draw, finish), origin | told)


def drawn_origin(verified: VerifiedPlan, count: int) -> dict[str, Any]:
    """Origin of so many samples of the plan's own, were they drawn of the files that are there now.

    Of coarse samples, where the plan's are completed afterwards.

    Raises MissingError: what they are made of is not there.
    """
    plan = verified.plan
    return _made_of(verified, count, _route(plan, own_model(plan)), asked_of(plan)).origin


def is_kept(folder: Path, origin: dict[str, Any]) -> bool:
    """Whether a folder holds whole samples of that origin."""
    summary = read_summary(folder)
    return summary is not None and summary["origin"] == origin


def _shown(verified: VerifiedPlan, folder: Path, count: int, route: Route) -> dict[str, Any]:
    """Write the contact sheet; what there is to say of the samples."""
    plan, run = verified.plan, verified.run
    sheet = run.released / sheet_name(folder.name)
    # The sheet shows a few: the others are not opened.
    images, labels = read_samples(folder, plan.private.classes, most=COLUMNS, first=ROWS)
    rows = rows_by_class(images, labels, plan.private.classes)
    words = f"{'coarse' if is_coarse(folder.name) else ''}{route.suffix}".lstrip("-")
    title = f"{plan.name}: synthetic" + (f", {words}" if words else "")
    contact_sheet(rows, sheet, title=title, stamp=stamps(verified.lock))
    return {
        "coarse" if is_coarse(folder.name) else "samples": str(folder),
        "count": count,
        "model": route.name,
        "contact_sheet": str(sheet),
    }


def is_coarse(name: str) -> bool:
    """Whether a folder of that name in `released/` holds coarse samples."""
    return name.startswith("coarse")


def sheet_name(folder: str) -> str:
    """The contact sheet of a folder of samples, beside it.

    >>> sheet_name("samples"), sheet_name("samples-prior"), sheet_name("coarse")
    ('contact-sheet.png', 'contact-sheet-prior.png', 'contact-sheet-coarse.png')
    """
    suffix = f"-{folder}" if is_coarse(folder) else folder.removeprefix("samples")
    return f"contact-sheet{suffix}.png"


def own_model(plan: Plan) -> str:
    """What the plan itself samples from: the release, or the last model that it makes."""
    if plan.sampling.method in {"release", POPULATION, GENERATOR}:
        return plan.sampling.method
    return last_model(plan)


def last_model(plan: Plan) -> str:
    """The last velocity model that the plan makes."""
    if plan.stages.train is not None:
        return "model"
    return "distilled" if plan.distillation is not None else "prior"


def _check(plan: Plan, count: int, model: str) -> None:
    known = _models_of(plan)
    if model not in known:
        raise UsageError(
            f"there is no model {model!r} to sample", hint=f"--model {'|'.join(known)}"
        )
    if model == PLAIN and plan.sampling.augment is None:
        raise UsageError(
            "the plan does not augment its samples: they are plain as they are",
            hint="leave --model out",
        )
    _check_count(count)


def _models_of(plan: Plan) -> tuple[str, ...]:
    """What can be sampled of a plan."""
    if plan.stages.embedding is not None:
        return GENERATOR_MODELS
    if plan.stages.votes is not None:
        return POPULATION_MODELS
    return TOKEN_MODELS if plan.learns_tokens else MODELS


def _check_count(count: int) -> None:
    if count < 1:
        raise UsageError(f"{count} samples were asked for; expected at least 1", hint="-n 1000")


def _pictures(representation: Representation, draw: Draw, finish: Finish) -> Pictures:
    """Draw, decode and finish; rounded to bytes once, at the end."""

    def pictures(labels: Tensor, source: torch.Generator) -> Drawn:
        decoded = representation.decode_pixels(draw(labels, source))
        return Drawn(as_bytes(finish(decoded, source)))

    return pictures


def fresh_generator() -> torch.Generator:
    """A generator seeded by the operating system. For post-processing: no secret rests on it."""
    source = torch.Generator()
    source.seed()
    return source


def _geometry_hash(run: RunDir) -> str:
    return sha256_file(run.public / "geometry.safetensors")
