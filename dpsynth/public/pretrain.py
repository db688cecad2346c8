"""`dpsynth pretrain`: everything that comes from public data, in resumable stages.

`geometry.safetensors` (the code space), `prior.safetensors` (the velocity prior), for plans with
cells `within.safetensors` (how public codes spread inside their classes), for plans that project
`projection.safetensors` (the basis in which moments are released), and last
`calibration.json`, which names them by hash and whose own hash every charge carries. A stage is
skipped when its file says that it was made by the same recipe: settings, seed, public content.

A plan that releases mean embeddings has its feature map alone (`public.embedding_stage`).

A plan with votes has the space that records vote in (`public.vote_stage`).

A frozen text-to-image prior is not trained: its own samples, its prompts and its codes' mean are
made in place of that (`public.frozen_stage`).

Plans with spectral tokens also have a tokenizer and a transformer (`public.token_stage`); where
tokens are the representation, these are all there is beside the calibration.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.console import Bar, note, progress
from dpsynth.models.frozen.latents import LatentCodec
from dpsynth.models.velocity import captions_of, image_of, save_velocity
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.captions import require_drawable
from dpsynth.public.copies import altered, augmented, codes_of, show
from dpsynth.public.embedding_stage import pretrain_map
from dpsynth.public.feature_stage import feature_files, features_recipe, features_stage
from dpsynth.public.fit import autoencoder_steps, fit_autoencoder
from dpsynth.public.frozen_stage import FrozenStage
from dpsynth.public.geometry import PixelCodec, fit_pca
from dpsynth.public.job import FORMAT, Job
from dpsynth.public.kept import is_named, kept_calibration, made_by
from dpsynth.public.measures import RADIUS_PLOT, TAU_PLOT, features_of, measures
from dpsynth.public.perceptual import feature_loss
from dpsynth.public.prior import fit_prior
from dpsynth.public.profile import PROFILE_PLOT, uses_profile
from dpsynth.public.projection import (
    PROJECTION,
    Projection,
    fit_projection,
    projection_of,
    read_projection,
    save_projection,
)
from dpsynth.public.recipes import (
    PRIOR,
    WITHIN_KEY,
    calibration_recipe,
    geometry_recipe,
    hashes_of,
    prior_recipe,
    projection_recipe,
    within_recipe,
)
from dpsynth.public.representation import (
    GEOMETRY,
    AutoencoderCodec,
    Codec,
    Representation,
    load_geometry,
    save_geometry,
    standardised,
)
from dpsynth.public.restore import put_back
from dpsynth.public.sharpening import source_gains
from dpsynth.public.sources import read_public
from dpsynth.public.spool import in_parts
from dpsynth.public.token_stage import pretrain_tokens, token_facts, token_recipes, token_stages
from dpsynth.public.tokenizer import SHEET as TOKENS_SHEET
from dpsynth.public.tokens import token_files
from dpsynth.public.vote_stage import (
    require_votes,
    vote_facts,
    vote_files,
    vote_recipes,
    vote_stage,
)
from dpsynth.public.wavelet import wavelet_codec
from dpsynth.public.within import WITHIN, save_within, spread_of, uses_within

SHEET = "reconstructions.png"


def pretrain(verified: VerifiedPlan) -> dict[str, Any]:
    """Make, or finish making, the public room of a run; return the calibration.

    Opens the plan's public sources alone, and the captions that images are to be drawn for.

    Raises:
        DataError, MissingError: a public source, or the file of captions, cannot be read.
        PlanError: the captions are private ones.
        BudgetError: the result would change after a charge.
    """
    put_back(verified.run)
    require_drawable(verified.plan)
    frozen = None
    if verified.plan.frozen is not None:
        frozen = FrozenStage(verified.plan, verified.run)
        frozen.draw_own()
    job = Job(verified.plan, verified.run, read_public(verified.plan, verified.run), frozen=frozen)
    if job.plan.stages.embedding is not None:
        return pretrain_map(job)
    if job.plan.representation.kind == "tokens":
        return pretrain_tokens(job)
    require_votes(job)
    if (finished := _finished(job)) is not None:
        note("public room: all there already")
        return finished
    representation = _representation_stage(job)
    geometry_hash = sha256_file(job.run.public / GEOMETRY)
    # What a frozen model draws is as it is: of altered copies nothing is to be learned.
    copies = augmented(job.plan, job.public) if job.frozen is None else None
    both = (job.public.images,) if copies is None else (job.public.images, copies)
    wide = codes_of(representation, *both)
    codes = wide[: len(job.public.images)]
    labels = torch.from_numpy(job.public.labels)
    projection = _projection_stage(job, wide, geometry_hash)
    _prior_stage(job, representation, wide, labels.repeat(len(both)), geometry_hash)
    _within_stage(job, features_of(codes, projection), labels, geometry_hash)
    features_stage(job)
    vote_stage(job)
    if job.plan.tokens is not None:
        token_stages(job)
    facts = _calibration_stage(job, representation, projection, wide, labels)
    show(job.plan, job.public, copies, representation, job.run.public / SHEET)
    return facts


def _representation_stage(job: Job) -> Representation:
    path, recipe = job.run.public / GEOMETRY, geometry_recipe(job)
    if made_by(path, recipe):
        note("representation: kept")
        return load_geometry(path, job.plan)[0]
    job.stale(path)
    scaled, facts = job.frozen is None, {} if job.frozen is None else job.frozen.facts
    representation = standardised(_fit_codec(job), job.public.images, scaled=scaled)
    facts = {**facts, "recipe": recipe, "kind": job.plan.representation.kind}
    save_geometry(path, representation, facts)
    # What was written is what is used from here on, also by this process.
    return load_geometry(path, job.plan)[0]


def _fit_codec(job: Job) -> Codec:
    settings, images = job.plan.representation, job.public.images
    if settings.kind == "pixels":
        shape = job.plan.private.image
        return PixelCodec((shape.height, shape.width, shape.channels))
    if settings.kind == "latent":
        return LatentCodec.of(job.plan)
    if settings.kind == "wavelet":
        return wavelet_codec(settings, job.plan.private.image)
    if settings.kind == "pca":
        with progress("representation: PCA of public images", 2 * len(images)) as bar:
            return fit_pca(
                _watched(chain(in_parts(images), altered(job.plan, job.public)), bar), settings.code
            )
    total = autoencoder_steps(settings.autoencoder, len(images))
    perceived = feature_loss(job.public, settings.autoencoder, job.plan.public_seed + 5)
    with progress("representation: autoencoder on public images", total) as bar:
        model = fit_autoencoder(
            images,
            settings,
            job.plan.private.image,
            seed=job.plan.public_seed,
            drawn=job.public.drawn,
            perceived=perceived,
            advance=bar.advance,
        )
    return AutoencoderCodec(model)


def _projection_stage(job: Job, wide: Tensor, geometry_hash: str) -> Projection | None:
    dim, path = projection_of(job.plan), job.run.public / PROJECTION
    if dim is None:
        return None
    recipe = projection_recipe(job, geometry_hash)
    if made_by(path, recipe):
        note("projection: kept")
    else:
        job.stale(path)
        save_projection(path, fit_projection(wide, dim), recipe)
    return read_projection(path, job.plan)


def _prior_stage(
    job: Job, representation: Representation, codes: Tensor, labels: Tensor, geometry_hash: str
) -> None:
    plan, path = job.plan, job.run.public / PRIOR
    recipe = prior_recipe(job, geometry_hash)
    if made_by(path, recipe):
        note("prior: kept")
        return
    job.stale(path)
    if job.frozen is not None:
        job.frozen.save_prior(representation, recipe, path)
        return
    with progress("prior: rectified flow on public codes", plan.pretraining.steps) as bar:
        model = fit_prior(
            codes,
            labels,
            plan.velocity,
            plan.pretraining,
            plan.private.conditions,
            seed=plan.public_seed + 1,
            advance=bar.advance,
            captions=captions_of(plan),
            image=image_of(plan),
            captions_of=_image_captions(job, len(codes)),
        )
    save_velocity(model, path, plan.velocity, room="public", recipe=recipe)


def _image_captions(job: Job, codes: int) -> tuple[str, ...] | None:
    """The captions of that many codes, a copy of all images after the other; None for labels."""
    captions = job.public.captions if job.plan.velocity.kind == "mmdit" else None
    return None if captions is None else captions * (codes // len(captions))


def _within_stage(job: Job, codes: Tensor, labels: Tensor, geometry_hash: str) -> None:
    if not uses_within(job.plan):
        return
    path, recipe = job.run.public / WITHIN, within_recipe(job, geometry_hash)
    if made_by(path, recipe):
        note("spread of public codes: kept")
        return
    spread = spread_of(job.plan, codes, labels)

    def save(target: Path) -> None:
        save_within(target, spread.within, recipe, spread.total)

    if path.exists() or not is_named(job.run, WITHIN_KEY, save):
        job.stale(path)
    save(path)


def _calibration_stage(
    job: Job,
    representation: Representation,
    projection: Projection | None,
    wide: Tensor,
    labels: Tensor,
) -> dict[str, Any]:
    """What was measured, by `measures`, the other files' hashes, and sharpening gains if asked."""
    path, prior = job.run.calibration, job.run.public / PRIOR
    hashes = hashes_of(job)
    recipe = calibration_recipe(job, *hashes.values())
    if (kept := kept_calibration(job.run, recipe)) is not None:
        note("calibration: kept")
        return kept
    job.stale(path)
    facts = {
        "format": FORMAT,
        "recipe": recipe,
        **measures(
            job.plan,
            job.run.public,
            prior=prior,
            wide=wide,
            labels=labels,
            projection=projection,
        ),
        **token_facts(job),
        **vote_facts(job, representation),
        "dim": wide.shape[1],
        **hashes,
        **({} if job.frozen is None else job.frozen.facts),
        "sources": [source.to_json() for source in job.public.sources],
    }
    if job.plan.sampling.sharpen == "public":
        gains = source_gains(representation, job.public, job.plan.public_seed + 4)
        facts |= {"sharpen_gains": gains, "sharpen_gain": min(gains)}
    write_json(path, facts)
    return facts


def _watched(parts: Iterable[NDArray[np.uint8]], bar: Bar) -> Iterator[NDArray[np.uint8]]:
    """The parts; `bar` moves by their rows once they were taken."""
    for part in parts:
        yield part
        bar.advance(len(part))


def _finished(job: Job) -> dict[str, Any] | None:
    """The calibration, when every file of the room is there and made by this recipe."""
    room = job.run.public
    within = [WITHIN] if uses_within(job.plan) else []
    basis = [PROJECTION] if projection_of(job.plan) is not None else []
    plots = [PROFILE_PLOT] if uses_profile(job.plan) else []
    captions, tokens = feature_files(job.plan).values(), token_files(job.plan).values()
    sheets = [TOKENS_SHEET] if tokens else []
    votes = vote_files(job.plan).values()
    measured = RADIUS_PLOT if job.frozen is not None else TAU_PLOT
    files = (GEOMETRY, PRIOR, measured, SHEET, *within, *basis, *plots, *captions, *tokens, *sheets)
    files = (*files, *votes)
    if not all((room / name).exists() for name in files):
        return None
    hashes = hashes_of(job)
    geometry_hash = hashes["geometry_sha256"]
    recipes = {GEOMETRY: geometry_recipe(job), PRIOR: prior_recipe(job, geometry_hash)}
    if within:
        recipes[WITHIN] = within_recipe(job, geometry_hash)
    if basis:
        recipes[PROJECTION] = projection_recipe(job, geometry_hash)
    recipes |= {name: features_recipe(job) for name in captions} | token_recipes(job)
    recipes |= vote_recipes(job)
    made = all(made_by(room / name, recipe) for name, recipe in recipes.items())
    recipe = calibration_recipe(job, *hashes.values())
    return kept_calibration(job.run, recipe) if made else None
