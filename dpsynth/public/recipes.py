"""What decides each file of a public room, as hashes: a file made by the same recipe is kept.

Settings enter as the plan's hash sees them: a later key at its default leaves recipes as they are.
"""

from typing import Any

from dpsynth.artifacts.files import sha256_file
from dpsynth.models.velocity import captions_of
from dpsynth.public.feature_stage import feature_files
from dpsynth.public.job import Job
from dpsynth.public.measures import moments_of
from dpsynth.public.profile import profile_recipe
from dpsynth.public.projection import HASH_KEY, PROJECTION, projection_of
from dpsynth.public.representation import GEOMETRY
from dpsynth.public.start import uses_plateau
from dpsynth.public.tokens import token_files
from dpsynth.public.vote_stage import vote_files, vote_recipe
from dpsynth.public.within import WITHIN, uses_total, uses_within

PRIOR = "prior.safetensors"
WITHIN_KEY = "within_sha256"
# Part of the recipes of plans that deform, that sharpen, that project, and that guide.
_DEFORMED, _SHARPENED, _PROJECTED, _GUIDED = 2, 2, 1, 1


def geometry_recipe(job: Job) -> str:
    """Of the code space."""
    settings = job.plan.facts()["representation"]
    later: list[Any] = [_DEFORMED] if job.plan.representation.autoencoder.deform > 0 else []
    later += [] if job.frozen is None else [job.frozen.found.weights_sha256]
    kept = {k: v for k, v in settings.items() if k != "clip_quantile"}
    return job.recipe("representation", kept, *later)


def prior_recipe(job: Job, geometry_hash: str) -> str:
    """Of the velocity prior."""
    plan = job.plan
    if job.frozen is not None:
        return job.recipe("prior", "frozen", *job.frozen.recipe, geometry_hash)
    velocity = plan.facts()["velocity"]
    parts = (velocity, plan.pretraining.model_dump(), plan.private.conditions)
    words = [captions_of(plan)] if plan.velocity.kind == "mmdit" else []
    return job.recipe("prior", *parts, geometry_hash, *words)


def within_recipe(job: Job, geometry_hash: str) -> str:
    """Of how public codes spread inside their classes."""
    dim = projection_of(job.plan)
    total = ["total"] if uses_total(job.plan) else []
    basis = [] if dim is None else [_PROJECTED, dim]
    return job.recipe("within", geometry_hash, *basis, *total)


def projection_recipe(job: Job, geometry_hash: str) -> str:
    """Of the basis in which moments are released."""
    return job.recipe("projection", _PROJECTED, projection_of(job.plan), geometry_hash)


def calibration_recipe(job: Job, *hashes: str) -> str:
    """`hashes`: of the files that the calibration names, in the order of `hashes_of`."""
    settings = moments_of(job.plan).model_dump(include={"covariance", "rank", "floor"})
    quantile = job.plan.representation.clip_quantile
    later: list[Any] = ["sharpen", _SHARPENED] if job.plan.sampling.sharpen == "public" else []
    if uses_plateau(job.plan):
        sampling = job.plan.sampling
        later += ["guide", _GUIDED, sampling.steps, sampling.guidance]
    later += profile_recipe(job.plan) + vote_recipe(job.plan)
    return job.recipe("calibration", settings, quantile, *hashes, *later)


def hashes_of(job: Job) -> dict[str, str]:
    """What the calibration says of the files beside it."""
    names = {"geometry_sha256": GEOMETRY, "prior_sha256": PRIOR}
    if uses_within(job.plan):
        names[WITHIN_KEY] = WITHIN
    if projection_of(job.plan) is not None:
        names[HASH_KEY] = PROJECTION
    names |= feature_files(job.plan) | token_files(job.plan) | vote_files(job.plan)
    return {key: sha256_file(job.run.public / name) for key, name in names.items()}
