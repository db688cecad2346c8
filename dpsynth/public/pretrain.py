"""`dpsynth pretrain`: everything that comes from public data, in resumable stages.

`geometry.safetensors` (the code space), `prior.safetensors` (the velocity prior), for plans with
cells `within.safetensors` (how public codes spread inside their classes), and last
`calibration.json`, which names them by hash and whose own hash every charge carries. A stage is
skipped when its file says that it was made by the same recipe: settings, seed, public content.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
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
from dpsynth.artifacts.sheet import contact_sheet
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.console import Bar, note, progress
from dpsynth.errors import BudgetError, DpsynthError
from dpsynth.models.autoencoder import as_bytes, pixels
from dpsynth.models.field import AnalyticField
from dpsynth.models.seeding import generator
from dpsynth.models.velocity import save_velocity
from dpsynth.planning.release import Moments
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public import calibrate
from dpsynth.public.augment import seen
from dpsynth.public.fit import autoencoder_steps, fit_autoencoder
from dpsynth.public.geometry import PixelCodec, fit_pca
from dpsynth.public.perceptual import feature_loss
from dpsynth.public.prior import fit_prior
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
from dpsynth.public.sharpening import source_gains
from dpsynth.public.sources import PublicImages, read_public
from dpsynth.public.spool import in_parts, spooled
from dpsynth.public.within import WITHIN, save_within, uses_within, within_covariance

PRIOR, TAU_PLOT, SHEET = "prior.safetensors", "tau.png", "reconstructions.png"
FORMAT = "dpsynth-calibration-1"
SHEET_IMAGES = 16
_PART = 2_000
# Part of every recipe: raise it when the same settings give another result.
_VERSION = 1
# Part of the recipes of plans that deform, and of those that sharpen: the same for them alone.
_DEFORMED, _SHARPENED = 2, 2


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
                hint="start a new run folder: dpsynth plan PLAN --run runs/NEW",
            )


def pretrain(verified: VerifiedPlan) -> dict[str, Any]:
    """Make, or finish making, the public room of a run; return the calibration.

    Opens the plan's public sources alone.

    Raises:
        DataError, MissingError: a public source cannot be read.
        BudgetError: the result would change after a charge.
    """
    job = _Job(verified.plan, verified.run, read_public(verified.plan))
    if (finished := _finished(job)) is not None:
        note("public room: all there already")
        return finished
    representation = _representation_stage(job)
    geometry_hash = sha256_file(job.run.public / GEOMETRY)
    augmented = _augmented(job)
    wide = _codes(representation, job.public.images, augmented)
    codes = wide[: len(job.public.images)]
    labels = torch.from_numpy(job.public.labels)
    _prior_stage(job, wide, labels.repeat(2), geometry_hash)
    _within_stage(job, codes, labels, geometry_hash)
    facts = _calibration_stage(job, representation, codes, wide, labels)
    _sheet(job, representation, augmented)
    return facts


def _codes(representation: Representation, *images: NDArray[np.uint8]) -> Tensor:
    """Codes (n, d) float32 of these arrays of images, one after another; on disk if they are many.

    Encoded in parts of `_PART` and not as they lie on disk: so a code's bits do not hang on that.
    """
    parts = (
        representation.encode(array[start : start + _PART]).numpy()
        for array in images
        for start in range(0, len(array), _PART)
    )
    return torch.from_numpy(spooled(parts, (representation.dim,), np.float32))


def _representation_stage(job: _Job) -> Representation:
    path, recipe = job.run.public / GEOMETRY, _geometry_recipe(job)
    if _made_by(path, recipe):
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
    if settings.kind == "pca":
        with progress("representation: PCA of public images", 2 * len(images)) as bar:
            return fit_pca(_watched(chain(in_parts(images), _altered(job)), bar), settings.code)
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


def _prior_stage(job: _Job, codes: Tensor, labels: Tensor, geometry_hash: str) -> None:
    plan, path = job.plan, job.run.public / PRIOR
    recipe = _prior_recipe(job, geometry_hash)
    if _made_by(path, recipe):
        note("prior: kept")
        return
    job.stale(path)
    with progress("prior: rectified flow on public codes", plan.prior.steps) as bar:
        model = fit_prior(
            codes,
            labels,
            plan.velocity,
            plan.prior,
            len(plan.private.classes),
            seed=plan.public_seed + 1,
            advance=bar.advance,
        )
    save_velocity(model, path, plan.velocity, room="public", recipe=recipe)


def _within_stage(job: _Job, codes: Tensor, labels: Tensor, geometry_hash: str) -> None:
    if not uses_within(job.plan):
        return
    path, recipe = job.run.public / WITHIN, _within_recipe(job, geometry_hash)
    if _made_by(path, recipe):
        note("spread of public codes: kept")
        return
    covariance = within_covariance(codes, labels)
    if path.exists() or not _names(job, covariance, recipe):
        job.stale(path)
    save_within(path, covariance, recipe)


def _names(job: _Job, covariance: NDArray[np.float64], recipe: str) -> bool:
    """Whether the calibration names this very file: then a lost one may come back at any time."""
    try:
        wanted = read_json(job.run.calibration).get("within_sha256")
    except DpsynthError:
        return False
    with TemporaryDirectory() as folder:
        save_within(Path(folder) / WITHIN, covariance, recipe)
        return sha256_file(Path(folder) / WITHIN) == wanted


def _calibration_stage(
    job: _Job,
    representation: Representation,
    codes: Tensor,
    wide: Tensor,
    labels: Tensor,
) -> dict[str, Any]:
    """Radius, tau and, where the plan asks, the sharpening gain.

    `wide` adds the augmented copies to `codes`. The radius is read from it: private codes may be
    longer than plain public ones, and a radius below them distorts every record, where one too
    large only adds noise.
    """
    path = job.run.public / CALIBRATION
    hashes = _hashes(job)
    settings = _moments(job.plan)
    quantile = job.plan.representation.clip_quantile
    recipe = _calibration_recipe(job, *hashes.values())
    if (kept := _kept_calibration(path, recipe)) is not None:
        note("calibration: kept")
        return kept
    job.stale(path)
    with progress("calibration: clip radius and tau", 1) as bar:
        curve, tau = _tau(codes, labels, settings, job.plan.public_seed + 2)
        calibrate.plot_tau(curve, tau, job.run.public / TAU_PLOT)
        bar.advance()
    facts = {
        "format": FORMAT,
        "recipe": recipe,
        "radius": calibrate.clip_radius(wide, quantile),
        "clip_quantile": quantile,
        "tau": tau,
        "tau_curve": curve.to_json(),
        "dim": codes.shape[1],
        **hashes,
        "sources": [source.to_json() for source in job.public.sources],
    }
    if job.plan.sampling.sharpen == "public":
        gains = source_gains(representation, job.public, job.plan.public_seed + 4)
        facts |= {"sharpen_gains": gains, "sharpen_gain": min(gains)}
    write_json(path, facts)
    return facts


def _tau(
    codes: Tensor, labels: Tensor, settings: Moments, seed: int
) -> tuple[calibrate.TauCurve, float]:
    gaussians = calibrate.class_gaussians(
        codes,
        labels,
        shared=settings.covariance == "shared",
        rank=settings.rank,
        floor=settings.floor,
    )
    curve = calibrate.tau_curve(codes, labels, AnalyticField(*gaussians), seed=seed)
    return curve, calibrate.knee(np.array(curve.t), np.array(curve.weighted))


def _watched(parts: Iterable[NDArray[np.uint8]], bar: Bar) -> Iterator[NDArray[np.uint8]]:
    """The parts; `bar` moves by their rows once they were taken."""
    for part in parts:
        yield part
        bar.advance(len(part))


def _augmented(job: _Job) -> NDArray[np.uint8]:
    """One altered copy of every public image; on disk if they are many."""
    return spooled(_altered(job), job.public.images.shape[1:], np.uint8)


def _altered(job: _Job) -> Iterator[NDArray[np.uint8]]:
    """One altered copy of every public image, as the autoencoder's training sees it, by parts.

    The same each time it is called.
    """
    source = generator(job.plan.public_seed + 3)
    settings = job.plan.representation.autoencoder
    images, drawn = torch.from_numpy(job.public.images), torch.from_numpy(job.public.drawn)
    for start in range(0, len(images), _PART):
        part = slice(start, start + _PART)
        yield as_bytes(seen(pixels(images[part]), settings, source, drawn[part]))


def _sheet(job: _Job, representation: Representation, augmented: NDArray[np.uint8]) -> None:
    """Public images, plain and altered, above what the code space makes of them."""
    path = job.run.public / SHEET
    source = generator(job.plan.public_seed)
    chosen = torch.randperm(len(augmented), generator=source)[:SHEET_IMAGES].numpy()
    rows = []
    for title, images in (("public", job.public.images[chosen]), ("altered", augmented[chosen])):
        rows += [(title, images), ("rebuilt", representation.decode(representation.encode(images)))]
    contact_sheet(rows, path, title="Public images and their reconstructions")


def _geometry_recipe(job: _Job) -> str:
    # As the plan's hash sees it: a later key at its default leaves older recipes as they are.
    settings = job.plan.facts()["representation"]
    later = [_DEFORMED] if job.plan.representation.autoencoder.deform > 0 else []
    kept = {k: v for k, v in settings.items() if k != "clip_quantile"}
    return job.recipe("representation", kept, *later)


def _prior_recipe(job: _Job, geometry_hash: str) -> str:
    plan = job.plan
    parts = (plan.velocity.model_dump(), plan.prior.model_dump(), len(plan.private.classes))
    return job.recipe("prior", *parts, geometry_hash)


def _within_recipe(job: _Job, geometry_hash: str) -> str:
    return job.recipe("within", geometry_hash)


def _calibration_recipe(job: _Job, *hashes: str) -> str:
    """`hashes`: of the files that the calibration names, in the order of `_hashes`."""
    settings = _moments(job.plan).model_dump(include={"covariance", "rank", "floor"})
    quantile = job.plan.representation.clip_quantile
    later = ["sharpen", _SHARPENED] if job.plan.sampling.sharpen == "public" else []
    return job.recipe("calibration", settings, quantile, *hashes, *later)


def _hashes(job: _Job) -> dict[str, str]:
    """What the calibration says of the files beside it."""
    names = {"geometry_sha256": GEOMETRY, "prior_sha256": PRIOR}
    if uses_within(job.plan):
        names["within_sha256"] = WITHIN
    return {key: sha256_file(job.run.public / name) for key, name in names.items()}


def _moments(plan: Plan) -> Moments:
    """What tau is measured for; without a moments stage, the paper's shared covariance."""
    return plan.stages.moments or Moments(covariance="shared")


def _finished(job: _Job) -> dict[str, Any] | None:
    """The calibration, when every file of the room is there and made by this recipe."""
    room = job.run.public
    within = [WITHIN] if uses_within(job.plan) else []
    if not all((room / name).exists() for name in (GEOMETRY, PRIOR, TAU_PLOT, SHEET, *within)):
        return None
    hashes = _hashes(job)
    geometry_hash = hashes["geometry_sha256"]
    recipes = {GEOMETRY: _geometry_recipe(job), PRIOR: _prior_recipe(job, geometry_hash)}
    if within:
        recipes[WITHIN] = _within_recipe(job, geometry_hash)
    made = all(_made_by(room / name, recipe) for name, recipe in recipes.items())
    recipe = _calibration_recipe(job, *hashes.values())
    return _kept_calibration(room / CALIBRATION, recipe) if made else None


def _made_by(path: Path, recipe: str) -> bool:
    try:
        return path.exists() and load_tensors(path)[1].get("recipe") == recipe
    except DpsynthError:
        return False  # damaged: made again


def _kept_calibration(path: Path, recipe: str) -> dict[str, Any] | None:
    try:
        facts: Mapping[str, Any] = read_json(path)
    except DpsynthError:
        return None
    return dict(facts) if facts.get("recipe") == recipe else None
