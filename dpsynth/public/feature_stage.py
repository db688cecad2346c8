"""The stage of `pretrain` that makes `features.safetensors`, from public captions alone."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsynth.console import note, progress
from dpsynth.models.sentence import encoder_folder, folder_sha256, load_encoder
from dpsynth.planning.caption_rules import condition_captions
from dpsynth.planning.captions import CaptionRelease, FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import has_constant
from dpsynth.public import calibrate
from dpsynth.public.captions import drawn_captions
from dpsynth.public.features import FEATURES, HASH_KEY, fit_features, release_of, save_features
from dpsynth.public.job import Job
from dpsynth.public.kept import is_named, made_by
from dpsynth.public.sources import PublicImages

FEATURE_PLOT = "features.png"
MOST_PUBLIC = 1024
"""Distinct public captions that a sentence encoder is calibrated on."""
# Part of the recipe: raise it when the same settings give other features.
_VERSION = 1


def feature_files(plan: Plan) -> dict[str, str]:
    """The stage's file by the calibration's key for it, where the plan has a caption release."""
    return {} if release_of(plan) is None else {HASH_KEY: FEATURES}


def features_recipe(job: Job) -> str:
    """Hash of what decides the features: captions, settings, encoder, public captions.

    Raises:
        MissingError: the encoder is not there.
    """
    release = release_of(job.plan)
    settings = {} if release is None else release.model_dump(mode="json")
    for key in ("encoder", "ridge", "blocks"):
        settings.pop(key, None)
    captions = condition_captions(job.plan.private.captions, job.plan.private.classes)
    # Where features are indicators, public captions do not matter.
    encoder = _encoder_hash(release)
    public = public_captions(job.plan, job.public) if encoder else []
    parts = (_VERSION, settings, has_constant(job.plan), captions, encoder, public)
    return job.recipe("features", *parts)


def features_stage(job: Job) -> None:
    """Make the features of a plan with a caption release, unless they are there.

    Raises:
        BudgetError: they would change after a charge.
        MissingError, DataError: the encoder is not there, or no encoder.
        PlanError: features that the plan does not declare.
    """
    release, path = release_of(job.plan), job.run.public / FEATURES
    if release is None:
        return
    recipe = features_recipe(job)
    if made_by(path, recipe):
        note("caption features: kept")
        return
    if path.exists():
        job.stale(path)
    with progress("caption features: public captions", 1) as bar:
        encoder = None if release.encoder is None else load_encoder(release.encoder)
        public = public_captions(job.plan, job.public)
        features, norms = fit_features(job.plan, release, public, encoder)
        _plot(norms, features.clip, job.run.public / FEATURE_PLOT)
        bar.advance()
    sha256 = "" if encoder is None else encoder.sha256

    def save(target: Path) -> None:
        save_features(target, features, recipe, sha256)

    if not is_named(job.run, HASH_KEY, save):
        job.stale(path)
    save(path)


def public_captions(plan: Plan, public: PublicImages) -> list[str]:
    """Distinct public captions to calibrate on, sorted; an even choice of `MOST_PUBLIC` at most.

    Those of public images; without any, those of the plan's conditions. For free captions, which
    have no conditions, also those that images are drawn for.
    """
    found = {text for text in public.captions or () if text}
    if isinstance(plan.private.captions, FreeCaptions):
        found.update(drawn_captions(plan))
    if not found:
        found.update(condition_captions(plan.private.captions, plan.private.classes))
    ordered = sorted(found)
    count = min(len(ordered), MOST_PUBLIC)
    return [ordered[place * len(ordered) // count] for place in range(count)]


def _plot(norms: NDArray[np.float64], radius: float, path: Path) -> None:
    """Draw the norms (k,) of public caption features with their clip radius, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    # From 0: norms of indicators are all the same.
    axes.hist(norms, bins=60, range=(0.0, 1.1 * max(radius, float(norms.max()))), histtype="step")
    beyond = float(np.mean(norms > radius))
    axes.axvline(
        radius, color="black", linestyle=":", label=f"radius {radius:.4g} ({beyond:.2%} beyond)"
    )
    axes.set(xlabel="norm of a public caption's features", ylabel="captions", title="public data")
    axes.legend()
    calibrate.saved_figure(figure, path)


def _encoder_hash(release: CaptionRelease | None) -> str:
    if release is None or release.encoder is None:
        return ""
    return folder_sha256(encoder_folder(release.encoder))
