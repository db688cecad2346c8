"""The generator of a plan's embedding stage: fitted to what was released, then drawn from.

Post-processing: reads released and public values alone. The fit itself is `released.embedding`.
"""

from typing import Any

import torch
from torch import Tensor

from dpsynth.artifacts.embedding import NAME as EMBEDDING
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.settled import require_calibration, require_settled
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.generator import load_generator
from dpsynth.models.threads import one_thread
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.embedding_stage import embedding_of
from dpsynth.released.asked import Asked
from dpsynth.released.drawing import Route, model_path
from dpsynth.released.drawn import Drawn, Made
from dpsynth.released.embedding import train_generator
from dpsynth.released.finishing import finish_of

MODEL = "generator"
"""What can be sampled of a plan with an embedding stage."""


def fit(verified: VerifiedPlan) -> dict[str, Any]:
    """Write `released/generator.safetensors`, unless it is there for the same inputs.

    Raises:
        PlanError: the plan has no embedding stage.
        MissingError: the embedding was not released yet.
        ReplayError: it is not what the run's transcript settled, or the calibration changed since.
        UsageError: it is damaged, or its feature map cannot be made here.
    """
    run, settings = verified.run, embedding_of(verified.plan)
    if not (run.released / EMBEDDING).is_file():
        raise MissingError(
            "no embedding was released yet", hint=typed("dpsynth", "release-embedding", run.root)
        )
    require_settled(run, [EMBEDDING])
    require_calibration(run)
    return train_generator(run, settings.generator, verified.plan.public_seed)


def generator_pictures(verified: VerifiedPlan, count: int, route: Route, asked: Asked) -> Made:
    """How a plan's generator draws, and of what.

    Raises:
        MissingError: it was not fitted yet.
        UsageError: it is damaged, or fitted to another release than the one that is there.
        ReplayError: the embedding is not what the run's transcript settled.
    """
    run, path = verified.run, model_path(verified.run, MODEL)
    again = typed("dpsynth", "train", run.root)
    require_settled(run, [EMBEDDING])
    model, metadata = load_generator(path)
    if metadata.get("embedding_sha256") != sha256_file(run.released / EMBEDDING):
        raise UsageError(f"{path.name} was fitted to another release", hint=again)
    image = verified.plan.private.image
    shape = (image.height, image.width, image.channels)
    if (model.shape, model.classes) != (shape, asked.count):
        raise UsageError(
            f"{path.name} draws {model.shape} of {model.classes} classes, and the plan has "
            f"{shape} of {asked.count}",
            hint=again,
        )
    finish = finish_of(run, verified.plan, augmented=route.augmented)

    def pictures(labels: Tensor, source: torch.Generator) -> Drawn:
        noise = torch.randn(len(labels), model.latent, generator=source)
        with torch.inference_mode(), one_thread():
            return Drawn(as_bytes(finish(model(noise, labels), source)))

    origin = {"model": MODEL, "model_sha256": sha256_file(path), "count": count, **finish.facts()}
    return Made(pictures, origin)
