"""References of plans on codes: what their images are drawn from, and how."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.trained import start_path
from dpsynth.assess.audit.chain import prior_of
from dpsynth.assess.nonprivate.exact import exact_mixture
from dpsynth.assess.nonprivate.learning import trained
from dpsynth.assess.nonprivate.room import Place, load_model, save_model
from dpsynth.console import note
from dpsynth.errors import MissingError, PlanError
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.seeding import generator
from dpsynth.models.trainable import train_only
from dpsynth.models.velocity import build_for, describe
from dpsynth.planning.allocation import horizon_of
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Train
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.flow_task import FlowTask
from dpsynth.private.steps import Workload
from dpsynth.public.measures import tau_of
from dpsynth.public.representation import load_representation
from dpsynth.released.asked import Asked
from dpsynth.released.distill import teach
from dpsynth.released.drawing import Draw, flow_draw
from dpsynth.released.finishing import finish_of
from dpsynth.released.gaussians import ReleasedMixture, load_mixture
from dpsynth.released.guidance import Guide, TiltedStart

PRIOR = "prior.safetensors"

Pictures = Callable[[Tensor, torch.Generator], NDArray[np.uint8]]
"""Images (B, H, W, C) for labels (B,)."""
Start = tuple[Draw, float] | None
"""Where a guided flow starts, and at what time; None: from noise."""


def pretrained_pictures(verified: VerifiedPlan, asked: Asked) -> Pictures:
    """Images of the public prior, from noise: what public data alone give.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
    """
    model = _described(prior_of(verified.run, verified.plan), verified.plan, asked)
    return _finished(verified, _flow(model, verified.plan, asked, None))


def nonprivate_pictures(
    verified: VerifiedPlan, asked: Asked, place: Place, recipe: str
) -> Pictures:
    """Images of the plan's own way, of private records without clip and noise.

    A plan with private training is trained so. One that releases moments alone has exact ones
    estimated, and goes on from them as it says.

    Raises:
        PlanError: the plan reads no private records for its images, or has votes or an embedding.
        MissingError: an earlier public step has not run.
        DataError: the records were never charged for, and do not fit the plan.
    """
    plan = verified.plan
    if uses_training(plan):
        model = _trained(verified, place, recipe)
        return _finished(
            verified, _flow(_described(model, plan, asked), plan, asked, _released_start(verified))
        )
    if plan.stages.votes is not None or plan.stages.embedding is not None:
        raise PlanError(
            "votes and mean embeddings have no reference without privacy yet",
            hint="dpsynth reference RUN --kind pretrained",
        )
    if plan.stages.moments is None:
        raise PlanError(
            "nothing private goes into this plan's images: there is no reference without privacy",
            hint="dpsynth reference RUN --kind pretrained",
        )
    mixture = exact_mixture(verified)
    if plan.sampling.method == "release":
        return _finished(verified, mixture.draw)
    model = _taught(verified, mixture, asked, place, recipe)
    start = None
    if plan.sampling.method == "guide":
        begin = Guide().at(verified.run, plan)
        start = TiltedStart(mixture, begin), begin
    return _finished(verified, _flow(model, plan, asked, start))


def uses_training(plan: Plan) -> bool:
    """Whether the plan's images come from a model that was trained on private records."""
    return plan.stages.train is not None and plan.sampling.method != "release"


def start_weights(verified: VerifiedPlan) -> str:
    """Which weights training starts from: the run's own start, or the prior while it isn't there.

    Of a plan that distils, the distilled model is a released one: it may come later. So may the
    warm one of a plan with central images.
    """
    path = start_path(verified.run, verified.lock)
    return path.name if path.is_file() else PRIOR


def guides_by_release(verified: VerifiedPlan) -> bool:
    """Whether a trained plan's samples start from what was released, and that is there."""
    released = verified.run.released
    return verified.plan.sampling.method == "guide" and any(released.glob("*moments.safetensors"))


def _trained(verified: VerifiedPlan, place: Place, recipe: str) -> nn.Module:
    plan, settings = verified.plan, verified.plan.stages.train
    if settings is None:
        raise PlanError("this plan has no train stage")
    kept = _shaped(verified.run, plan)
    if load_model(kept, place, recipe):
        return kept.eval()
    return trained(verified, _task(verified, settings), settings, place, recipe)


def _shaped(run: RunDir, plan: Plan) -> nn.Module:
    """A model of the plan's form, to be filled."""
    return build_for(plan) if plan.frozen is None else prior_of(run, plan)


def _task(verified: VerifiedPlan, settings: Train) -> FlowTask:
    """The run's own task; of a plan that was not distilled yet, from the prior on all of [0, 1]."""
    plan, run = verified.plan, verified.run
    if start_path(run, verified.lock).is_file():
        return FlowTask.load(run, plan, verified.lock)
    what = "distilled model" if plan.stages.central is None else "warm start"
    note(f"there is no {what} yet: training starts from the public prior")
    model = prior_of(run, plan)
    train_only(model, settings.parameters)
    work = Workload(settings, plan.private.capacity, plan.private.conditions, 0.0)
    return FlowTask(plan, load_representation(run, plan), model, work)


def _taught(
    verified: VerifiedPlan, mixture: ReleasedMixture, asked: Asked, place: Place, recipe: str
) -> nn.Module:
    """The prior, or what distillation of the exact moments makes of it."""
    plan, run, settings = verified.plan, verified.run, verified.plan.distillation
    prior = _described(prior_of(run, plan), plan, asked)
    if settings is None:
        return prior
    kept = _shaped(run, plan)
    if load_model(kept, place, recipe):
        return _described(kept.eval(), plan, asked)
    horizon = horizon_of(settings, tau_of(run, plan))
    source = generator(plan.public_seed)
    model = teach(deepcopy(prior), prior, mixture, settings, horizon=horizon, source=source)
    save_model(model, place, recipe)
    return model


def _released_start(verified: VerifiedPlan) -> Start:
    """Where the plan's own samples start, as long as that was released."""
    if verified.plan.sampling.method != "guide":
        return None
    try:
        mixture, _ = load_mixture(verified.run, verified.plan)
    except MissingError:
        note("the release that guides the plan's samples is not there: these start from noise")
        return None
    begin = Guide().at(verified.run, verified.plan)
    return TiltedStart(mixture, begin), begin


def _described(model: nn.Module, plan: Plan, asked: Asked) -> nn.Module:
    """For free captions the model's labels mean those that images are drawn for."""
    if isinstance(plan.private.captions, FreeCaptions):
        describe(model, asked.captions)
    return model


def _flow(model: nn.Module, plan: Plan, asked: Asked, start: Start) -> Draw:
    """The plan's Euler sampler of a model."""
    return flow_draw(model, plan, asked, *(start or ()))[0]


def _finished(verified: VerifiedPlan, draw: Draw) -> Pictures:
    """Decoded and finished as the plan's own samples are."""
    representation = load_representation(verified.run, verified.plan)
    finish = finish_of(verified.run, verified.plan, augmented=True)

    def pictures(labels: Tensor, source: torch.Generator) -> NDArray[np.uint8]:
        return as_bytes(finish(representation.decode_pixels(draw(labels, source)), source))

    return pictures
