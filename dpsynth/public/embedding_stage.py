"""The public room of a plan that releases mean embeddings: its feature map, and nothing else.

No code space and no prior: `feature-map.safetensors` holds the recipe of the map, and
`calibration.json` names it by hash.
"""

from typing import Any

from dpsynth.artifacts.embedding import MAP_NAME, MapRecipe, load_recipe, save_recipe
from dpsynth.artifacts.files import read_json, sha256_file, write_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import require_calibration
from dpsynth.console import note, progress
from dpsynth.errors import MissingError, PlanError, UsageError, typed
from dpsynth.models.embeddings.build import build_map
from dpsynth.models.embeddings.space import FeatureMap
from dpsynth.planning.embedding import Embedding
from dpsynth.planning.schema import Plan
from dpsynth.public.embedding import calibrate_map
from dpsynth.public.job import FORMAT, Job
from dpsynth.public.kept import is_named, kept_calibration, made_by

MAP_KEY = "feature-map_sha256"
"""What the calibration calls the feature map's hash."""
_VERSION = 1  # part of the recipes: raise it when the same settings give another map
_OF_KIND = {
    "fourier": {"features", "bandwidth"},
    "hermite": {"length", "order", "pairs", "pair_order", "alpha"},
    "tangent": {"width", "centred"},
}


def embedding_of(plan: Plan) -> Embedding:
    """The plan's embedding stage. Raises PlanError where it has none."""
    settings = plan.stages.embedding
    if settings is None:
        raise PlanError(
            "this plan has no embedding stage",
            hint="write `method: merf` (or hermite, ntk) into the plan, and plan a new run",
        )
    return settings


def pretrain_map(job: Job) -> dict[str, Any]:
    """Make the public room, or keep what is there; return the calibration.

    Raises:
        BudgetError: the result would change after a charge.
        UsageError: too few public images, or images that are all the same.
    """
    map_recipe = _map_recipe(job)
    _map_stage(job, map_recipe)
    recipe = job.recipe("embedding-calibration", _VERSION, map_recipe)
    digest = sha256_file(job.run.public / MAP_NAME)
    kept = kept_calibration(job.run, recipe)
    if kept is not None and kept.get(MAP_KEY) == digest:
        note("calibration: kept")
        return kept
    job.stale(job.run.calibration)
    made = load_recipe(job.run.public / MAP_NAME)
    facts = {
        "format": FORMAT,
        "recipe": recipe,
        "feature_map": {"kind": made.kind, **made.numbers},
        "dim": made.dim,
        MAP_KEY: digest,
        "sources": [source.to_json() for source in job.public.sources],
    }
    write_json(job.run.calibration, facts)
    return facts


def load_map(run: RunDir, plan: Plan) -> tuple[MapRecipe, FeatureMap]:
    """The run's feature map, with its recipe.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
        UsageError: it is not the one that the calibration names, does not fit the plan, or cannot
            be made here.
        ReplayError: the calibration is not the one that the run's charges name.
    """
    settings, image, path = embedding_of(plan), plan.private.image, run.public / MAP_NAME
    again = typed("dpsynth", "pretrain", run.root)
    if not path.is_file() or not run.calibration.is_file():
        raise MissingError("the public feature map is not there yet", hint=again)
    require_calibration(run)
    if sha256_file(path) != read_json(run.calibration).get(MAP_KEY):
        raise UsageError(
            f"{MAP_NAME} is not the file that {run.calibration.name} names", hint=again
        )
    recipe = load_recipe(path)
    shape = (image.height, image.width, image.channels)
    if (recipe.kind, recipe.shape) != (settings.kind, shape):
        raise UsageError(
            f"{MAP_NAME} is a {recipe.kind} map of images of {recipe.shape}, and the plan has "
            f"{settings.kind} of {shape}",
            hint=again,
        )
    return recipe, build_map(recipe)


def _map_stage(job: Job, recipe: str) -> None:
    path, settings = job.run.public / MAP_NAME, embedding_of(job.plan)
    if made_by(path, recipe):
        note("feature map: kept")
        return
    with progress(f"feature map: {settings.kind}, from public images", 1) as bar:
        made = calibrate_map(job.public.images, settings, job.plan.public_seed)
        bar.advance()
    if path.exists() or not is_named(job.run, MAP_KEY, lambda at: save_recipe(at, made, recipe)):
        job.stale(path)
    save_recipe(path, made, recipe)


def _map_recipe(job: Job) -> str:
    """Of the map: the settings of its kind alone, so that others may change."""
    settings = embedding_of(job.plan)
    kept = settings.model_dump(include=_OF_KIND[settings.kind])
    return job.recipe("feature-map", _VERSION, settings.kind, kept)
