"""`dpsynth pretrain`: everything that comes from public data, in resumable stages.

`geometry.safetensors` (the code space), `prior.safetensors` (the velocity prior), for plans with
cells `within.safetensors` (how public codes spread inside their classes), for plans that project
`projection.safetensors` (the basis in which moments are released), and last
`calibration.json`, which names them by hash and whose own hash every charge carries. A stage is
skipped when its file says that it was made by the same recipe: settings, seed, public content.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import (
    canonical_json,
    read_json,
    sha256_bytes,
    sha256_file,
    write_json,
)
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import Bar, note, progress
from dpsynth.errors import BudgetError, DpsynthError
from dpsynth.models.velocity import captions_of, image_of, save_velocity
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.copies import altered, augmented, codes_of, show
from dpsynth.public.feature_stage import feature_files, features_recipe, features_stage
from dpsynth.public.fit import autoencoder_steps, fit_autoencoder
from dpsynth.public.geometry import PixelCodec, fit_pca
from dpsynth.public.kept import is_named, made_by
from dpsynth.public.measures import TAU_PLOT, features_of, measures, moments_of
from dpsynth.public.perceptual import feature_loss
from dpsynth.public.prior import fit_prior
from dpsynth.public.profile import PROFILE_PLOT, profile_recipe, uses_profile
from dpsynth.public.projection import (
    HASH_KEY,
    PROJECTION,
    Projection,
    fit_projection,
    projection_of,
    read_projection,
    save_projection,
)
from dpsynth.public.representation import (
    CALIBRATION,
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
from dpsynth.public.sources import PublicImages, read_public
from dpsynth.public.spool import in_parts
from dpsynth.public.start import uses_plateau
from dpsynth.public.wavelet import wavelet_codec
from dpsynth.public.within import WITHIN, save_within, uses_within, within_covariance

PRIOR, SHEET = "prior.safetensors", "reconstructions.png"
FORMAT = "dpsynth-calibration-1"
_WITHIN_KEY = "within_sha256"
# Part of every recipe: raise it when the same settings give another result.
_VERSION = 1
# Part of the recipes of plans that deform, that sharpen, that project, and that guide.
_DEFORMED, _SHARPENED, _PROJECTED, _GUIDED = 2, 2, 1, 1


@dataclass(frozen=True)
class _Job:
    """What the stages share: the plan, where to write, and the public images."""

    plan: Plan
    run: RunDir
    public: PublicImages

    def recipe(self, stage: str, *parts: Any) -> str:
        """Hash of all that decides a stage's result."""
        image = self.plan.private.image.model_dump()
        sources = [facts.to_json() for facts in self.public.sources]
        whole = [_VERSION, stage, self.plan.public_seed, image, sources, *parts]
        return sha256_bytes(canonical_json({"recipe": whole}))

    def stale(self, path: Path) -> None:
        """Before a file is replaced: refuse when charges already name the calibration."""
        if self.run.transcript.exists():
            raise BudgetError(
                f"{path.name} would change, but this run has spent with the calibration it has",
                hint="put back the files of public/ that it spent with (released/public/ may hold "
                "a copy); or start anew, with new budget: dpsynth plan PLAN --run runs/NEW",
            )


def pretrain(verified: VerifiedPlan) -> dict[str, Any]:
    """Make, or finish making, the public room of a run; return the calibration.

    Opens the plan's public sources alone.

    Raises:
        DataError, MissingError: a public source cannot be read.
        BudgetError: the result would change after a charge.
    """
    put_back(verified.run)
    job = _Job(verified.plan, verified.run, read_public(verified.plan))
    if (finished := _finished(job)) is not None:
        note("public room: all there already")
        return finished
    representation = _representation_stage(job)
    geometry_hash = sha256_file(job.run.public / GEOMETRY)
    copies = augmented(job.plan, job.public)
    wide = codes_of(representation, job.public.images, copies)
    codes = wide[: len(job.public.images)]
    labels = torch.from_numpy(job.public.labels)
    projection = _projection_stage(job, wide, geometry_hash)
    _prior_stage(job, wide, labels.repeat(2), geometry_hash)
    _within_stage(job, features_of(codes, projection), labels, geometry_hash)
    features_stage(job)
    facts = _calibration_stage(job, representation, projection, wide, labels)
    show(job.plan, job.public, copies, representation, job.run.public / SHEET)
    return facts


def _representation_stage(job: _Job) -> Representation:
    path, recipe = job.run.public / GEOMETRY, _geometry_recipe(job)
    if made_by(path, recipe):
        note("representation: kept")
        return load_geometry(path, job.plan)[0]
    job.stale(path)
    representation = standardised(_fit_codec(job), job.public.images)
    save_geometry(path, representation, {"recipe": recipe, "kind": job.plan.representation.kind})
    # What was written is what is used from here on, also by this process.
    return load_geometry(path, job.plan)[0]


def _fit_codec(job: _Job) -> Codec:
    settings, images = job.plan.representation, job.public.images
    if settings.kind == "pixels":
        shape = job.plan.private.image
        return PixelCodec((shape.height, shape.width, shape.channels))
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


def _projection_stage(job: _Job, wide: Tensor, geometry_hash: str) -> Projection | None:
    dim, path = projection_of(job.plan), job.run.public / PROJECTION
    if dim is None:
        return None
    recipe = _projection_recipe(job, geometry_hash)
    if made_by(path, recipe):
        note("projection: kept")
    else:
        job.stale(path)
        save_projection(path, fit_projection(wide, dim), recipe)
    return read_projection(path, job.plan)


def _prior_stage(job: _Job, codes: Tensor, labels: Tensor, geometry_hash: str) -> None:
    plan, path = job.plan, job.run.public / PRIOR
    recipe = _prior_recipe(job, geometry_hash)
    if made_by(path, recipe):
        note("prior: kept")
        return
    job.stale(path)
    with progress("prior: rectified flow on public codes", plan.prior.steps) as bar:
        model = fit_prior(
            codes,
            labels,
            plan.velocity,
            plan.prior,
            plan.private.conditions,
            seed=plan.public_seed + 1,
            advance=bar.advance,
            captions=captions_of(plan),
            image=image_of(plan),
            captions_of=_image_captions(job, len(codes)),
        )
    save_velocity(model, path, plan.velocity, room="public", recipe=recipe)


def _image_captions(job: _Job, codes: int) -> tuple[str, ...] | None:
    """The captions of that many codes, a copy of all images after the other; None for labels."""
    captions = job.public.captions if job.plan.velocity.kind == "mmdit" else None
    return None if captions is None else captions * (codes // len(captions))


def _within_stage(job: _Job, codes: Tensor, labels: Tensor, geometry_hash: str) -> None:
    if not uses_within(job.plan):
        return
    path, recipe = job.run.public / WITHIN, _within_recipe(job, geometry_hash)
    if made_by(path, recipe):
        note("spread of public codes: kept")
        return
    covariance = within_covariance(codes, labels)

    def save(target: Path) -> None:
        save_within(target, covariance, recipe)

    if path.exists() or not is_named(job.run, _WITHIN_KEY, save):
        job.stale(path)
    save(path)


def _calibration_stage(
    job: _Job,
    representation: Representation,
    projection: Projection | None,
    wide: Tensor,
    labels: Tensor,
) -> dict[str, Any]:
    """What was measured, by `measures`, the other files' hashes, and sharpening gains if asked."""
    path, prior = job.run.public / CALIBRATION, job.run.public / PRIOR
    hashes = _hashes(job)
    recipe = _calibration_recipe(job, *hashes.values())
    if (kept := _kept_calibration(path, recipe)) is not None:
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
        "dim": wide.shape[1],
        **hashes,
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


def _geometry_recipe(job: _Job) -> str:
    # As the plan's hash sees it: a later key at its default leaves older recipes as they are.
    settings = job.plan.facts()["representation"]
    later = [_DEFORMED] if job.plan.representation.autoencoder.deform > 0 else []
    kept = {k: v for k, v in settings.items() if k != "clip_quantile"}
    return job.recipe("representation", kept, *later)


def _prior_recipe(job: _Job, geometry_hash: str) -> str:
    plan = job.plan
    # As the plan's hash sees it, as above.
    velocity = plan.facts()["velocity"]
    parts = (velocity, plan.prior.model_dump(), plan.private.conditions)
    words = [captions_of(plan)] if plan.velocity.kind == "mmdit" else []
    return job.recipe("prior", *parts, geometry_hash, *words)


def _within_recipe(job: _Job, geometry_hash: str) -> str:
    dim = projection_of(job.plan)
    return job.recipe("within", geometry_hash, *([] if dim is None else [_PROJECTED, dim]))


def _projection_recipe(job: _Job, geometry_hash: str) -> str:
    return job.recipe("projection", _PROJECTED, projection_of(job.plan), geometry_hash)


def _calibration_recipe(job: _Job, *hashes: str) -> str:
    """`hashes`: of the files that the calibration names, in the order of `_hashes`."""
    settings = moments_of(job.plan).model_dump(include={"covariance", "rank", "floor"})
    quantile = job.plan.representation.clip_quantile
    later: list[Any] = ["sharpen", _SHARPENED] if job.plan.sampling.sharpen == "public" else []
    if uses_plateau(job.plan):
        sampling = job.plan.sampling
        later += ["guide", _GUIDED, sampling.steps, sampling.guidance]
    later += profile_recipe(job.plan)
    return job.recipe("calibration", settings, quantile, *hashes, *later)


def _hashes(job: _Job) -> dict[str, str]:
    """What the calibration says of the files beside it."""
    names = {"geometry_sha256": GEOMETRY, "prior_sha256": PRIOR}
    if uses_within(job.plan):
        names[_WITHIN_KEY] = WITHIN
    if projection_of(job.plan) is not None:
        names[HASH_KEY] = PROJECTION
    names |= feature_files(job.plan)
    return {key: sha256_file(job.run.public / name) for key, name in names.items()}


def _finished(job: _Job) -> dict[str, Any] | None:
    """The calibration, when every file of the room is there and made by this recipe."""
    room = job.run.public
    within = [WITHIN] if uses_within(job.plan) else []
    basis = [PROJECTION] if projection_of(job.plan) is not None else []
    plots = [PROFILE_PLOT] if uses_profile(job.plan) else []
    captions = feature_files(job.plan).values()
    files = (GEOMETRY, PRIOR, TAU_PLOT, SHEET, *within, *basis, *plots, *captions)
    if not all((room / name).exists() for name in files):
        return None
    hashes = _hashes(job)
    geometry_hash = hashes["geometry_sha256"]
    recipes = {GEOMETRY: _geometry_recipe(job), PRIOR: _prior_recipe(job, geometry_hash)}
    if within:
        recipes[WITHIN] = _within_recipe(job, geometry_hash)
    if basis:
        recipes[PROJECTION] = _projection_recipe(job, geometry_hash)
    recipes |= {name: features_recipe(job) for name in captions}
    made = all(made_by(room / name, recipe) for name, recipe in recipes.items())
    recipe = _calibration_recipe(job, *hashes.values())
    return _kept_calibration(room / CALIBRATION, recipe) if made else None


def _kept_calibration(path: Path, recipe: str) -> dict[str, Any] | None:
    try:
        facts: Mapping[str, Any] = read_json(path)
    except DpsynthError:
        return None
    return dict(facts) if facts.get("recipe") == recipe else None
