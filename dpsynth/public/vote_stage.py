"""The stage of `pretrain` that makes the space in which records vote, and how it is read back.

The calibration says what the space is, and its radius; a LeNet's weights lie beside it. All of it
is fixed before the first charge, which names the calibration.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import note, progress
from dpsynth.errors import DataError, MissingError, PlanError, UsageError, typed
from dpsynth.models.inception import WEIGHTS, find_weights, load_inception
from dpsynth.planning.evolution import Evolution
from dpsynth.planning.schema import Plan
from dpsynth.public.job import Job
from dpsynth.public.kept import made_by
from dpsynth.public.representation import Representation, load_representation
from dpsynth.public.voting import (
    NAME,
    code_space,
    inception_features,
    inception_space,
    lenet_space,
    load_features,
    save_features,
    train_features,
)

HASH_KEY = "vote-features_sha256"
STEPS = 1_200
"""Optimiser steps of the public LeNet, as of `public.perceptual`."""
_VERSION = 1  # part of the recipes: raise it when the same settings give another space
_SEED = 9  # of the public seed's streams: those of the other stages come before


def vote_files(plan: Plan) -> dict[str, str]:
    """The stage's file by the calibration's key for it, where votes are by a public LeNet."""
    votes = plan.stages.votes
    return {HASH_KEY: NAME} if votes is not None and votes.features == "lenet" else {}


def vote_recipes(job: Job) -> dict[str, str]:
    """The recipe of each file of the stage."""
    return {name: job.recipe("votes", _VERSION, STEPS) for name in vote_files(job.plan).values()}


def vote_recipe(plan: Plan) -> list[Any]:
    """What the calibration's recipe has of the space; nothing for a plan without votes."""
    votes = plan.stages.votes
    if votes is None:
        return []
    weights = _inception_file() if votes.features == "inception" else None
    return ["votes", _VERSION, votes.features, "" if weights is None else sha256_file(weights)]


def require_votes(job: Job) -> None:
    """Refuse, before anything is made, a space that cannot be.

    Raises:
        DataError: the public images have one class, so that no classifier can be trained.
        MissingError: Inception's weights are not on this machine.
    """
    votes = job.plan.stages.votes
    if votes is not None and votes.features == "inception":
        _inception_file()
    if votes is not None and votes.features == "lenet" and job.public.classes < 2:
        raise DataError(
            "stages.votes.features: lenet needs public images of at least two classes",
            hint="add a public source (such as {kind: glyphs}), or write `features: codes`",
        )


def vote_stage(job: Job) -> None:
    """Train the public LeNet that records vote by, unless it is there; other spaces have no file.

    Raises BudgetError: it would change after a charge.
    """
    for name, recipe in vote_recipes(job).items():
        path, public = job.run.public / name, job.public
        if made_by(path, recipe):
            note("vote features: kept")
            return
        job.stale(path)
        with progress("vote features: a LeNet on public images"):
            net = train_features(
                public.images,
                public.labels,
                public.classes,
                steps=STEPS,
                seed=job.plan.public_seed + _SEED,
            )
        save_features(path, net, lenet_space(net, public.images).radius, recipe)


def vote_facts(job: Job, representation: Representation) -> dict[str, Any]:
    """What the calibration says of the space: its features and radius, and of whose weights."""
    votes = job.plan.stages.votes
    if votes is None:
        return {}
    facts: dict[str, Any] = {"features": votes.features}
    if votes.features == "lenet":
        image = job.plan.private.image
        space = load_features(job.run.public / NAME, (image.height, image.width, image.channels))
    elif votes.features == "inception":
        facts["weights_sha256"] = sha256_file(_inception_file())
        with progress("calibration: Inception features of public images"):
            space = inception_space(load_inception(_inception_file()), job.public.images)
    else:
        space = code_space(representation, job.public.images)
    return {"votes": {**facts, "dim": space.dim, "radius": space.radius}}


def load_vote_space(run: RunDir, plan: Plan, settings: Evolution) -> Representation:
    """The space that the run's records vote in.

    Raises:
        MissingError: `dpsynth pretrain` has not finished, or Inception's weights are not here.
        PlanError: the calibration is of another space.
        UsageError: a public file is not the one that the calibration names.
        ReplayError: the calibration is not the one that the run's charges name.
    """
    # Checks the calibration against the run's charges, too.
    representation, hint = load_representation(run, plan), typed("dpsynth", "pretrain", run.root)
    calibration = read_json(run.calibration)
    facts = calibration.get("votes")
    if not isinstance(facts, dict) or facts.get("features") != settings.features:
        raise PlanError("public/calibration.json has no vote space of this plan", hint=hint)
    radius = float(facts["radius"])
    if settings.features == "codes":
        return replace(representation, radius=radius)
    if settings.features == "lenet":
        path = run.public / NAME
        if not path.is_file() or sha256_file(path) != calibration.get(HASH_KEY):
            raise UsageError(f"{NAME} is not the file that calibration.json names", hint=hint)
        return replace(load_features(path, representation.shape), radius=radius)
    weights = _inception_file()
    if sha256_file(weights) != facts.get("weights_sha256"):
        raise UsageError(
            "the Inception weights here are not those that calibration.json names",
            hint="put those back that `dpsynth pretrain` found",
        )
    return inception_features(load_inception(weights), representation.shape, radius)


def _inception_file() -> Path:
    weights = find_weights(None)
    if weights is None:
        raise MissingError(
            "stages.votes.features: inception needs FID's weights, which are not on this machine",
            hint=f"put {WEIGHTS} into torch's hub cache, or write `features: lenet`",
        )
    return weights
