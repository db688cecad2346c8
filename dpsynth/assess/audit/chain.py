"""What follows a world's release: its mixture, distillation and samples, by the real parts.

Nothing here writes to the run: only its public room is read.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.audit.rounds import ReleasedRounds
from dpsynth.assess.audit.worlds import Pair
from dpsynth.errors import MissingError, PlanError, typed
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.flow import euler
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import load_for
from dpsynth.planning.allocation import horizon_of
from dpsynth.planning.schema import Plan
from dpsynth.public.captions import drawn_captions
from dpsynth.public.features import load_features
from dpsynth.public.measures import tau_of
from dpsynth.public.projection import load_release_space
from dpsynth.public.representation import Representation
from dpsynth.public.within import load_within
from dpsynth.released.cells import estimate_cells
from dpsynth.released.distill import teach
from dpsynth.released.drawing import Draw
from dpsynth.released.estimate import as_mixtures
from dpsynth.released.finishing import finish_of
from dpsynth.released.gaussians import ReleasedMixture, estimated
from dpsynth.released.guidance import Guide, TiltedStart
from dpsynth.released.regression import conditions_of, declared_count, estimate_conditions
from dpsynth.released.sampling import fresh_generator
from dpsynth.released.template import Templates

SHARD = 500
"""Samples drawn at a time."""


@dataclass(frozen=True)
class Bench:
    """What a world is trained with: the run's public room, and a plan that may differ from its own.

    lock: of `plan`, at its own epsilon; representation: of codes, with the clip radius R.
    """

    run: RunDir
    plan: Plan
    lock: Lock
    representation: Representation

    @property
    def tau(self) -> float:
        """See `tau_of`."""
        return tau_of(self.run, self.plan)


def mixture_of(bench: Bench, released: ReleasedRounds) -> ReleasedMixture:
    """The mixtures that the plan estimates from a release."""
    plan, settings = bench.plan, bench.plan.stages.moments
    if settings is None:
        raise PlanError("this plan has no moments stage")
    space = load_release_space(bench.run, plan)
    if isinstance(released.moments, ReleasedCross):
        features = load_features(bench.run, plan).of(drawn_captions(plan))
        conditions = conditions_of(plan, features, released.moments)
        found = estimate_conditions(released.moments, conditions, settings, declared_count(plan))
        mixtures = as_mixtures(found)
    elif released.cells is None:
        mixtures = as_mixtures(estimated(bench.run, plan, settings, released.moments))
    else:
        shapes = None
        if settings.cells is not None and settings.cells.template:
            shapes = Templates(space.representation, plan.public_seed + 5)
        within = load_within(bench.run, plan)
        mixtures = estimate_cells(released.moments, released.cells, settings, shapes, within)
    return ReleasedMixture(mixtures, space.projection if settings.projection else None)


def prior_of(run: RunDir, plan: Plan) -> nn.Module:
    """The run's public prior. Raises MissingError where `pretrain` has not made it."""
    path = run.public / "prior.safetensors"
    if not path.exists():
        raise MissingError(
            "the public prior is missing", hint=typed("dpsynth", "pretrain", run.root)
        )
    return load_for(path, plan)[0]


def start_of(bench: Bench, mixture: ReleasedMixture | None) -> nn.Module:
    """Weights that private training starts from: distilled where the plan distils, else public."""
    settings = bench.plan.distillation
    if settings is None or mixture is None:
        return prior_of(bench.run, bench.plan)
    horizon = horizon_of(settings, bench.tau)
    source = generator(bench.plan.public_seed)
    student, teacher = prior_of(bench.run, bench.plan), prior_of(bench.run, bench.plan)
    return teach(student, teacher, mixture, settings, horizon=horizon, source=source)


def draw_of(bench: Bench, mixture: ReleasedMixture | None, model: nn.Module | None) -> Draw:
    """How the plan draws codes: from the release, or by the sampler of `model`.

    Raises PlanError where the plan draws from what it does not make.
    """
    settings, dim = bench.plan.sampling, bench.plan.representation.code
    if settings.method == "release" or model is None:
        if mixture is None:
            raise PlanError("the plan draws from a release that it does not make")
        return mixture.draw
    start, begin = None, 0.0
    if settings.method == "guide" and mixture is not None:
        begin = Guide().at(bench.run, bench.plan)
        start = TiltedStart(mixture, begin)

    def draw(labels: Tensor, source: torch.Generator) -> Tensor:
        noise = torch.randn(len(labels), dim, generator=source)
        with one_thread():
            return euler(
                model,
                noise if start is None else start(labels, source),
                labels,
                null=bench.plan.private.conditions,
                steps=settings.steps,
                guidance=settings.guidance,
                start_time=begin,
            )

    return draw


def samples_of(bench: Bench, draw: Draw, count: int) -> Pair:
    """`count` finished images with their labels in turn, as the plan would release them."""
    finish = finish_of(bench.run, bench.plan, augmented=True)
    source = fresh_generator()
    labels = torch.arange(count) % bench.plan.private.conditions
    parts = []
    for some in torch.split(labels, SHARD):
        pixels = bench.representation.decode_pixels(draw(some, source))
        parts.append(as_bytes(finish(pixels, source)))
    return np.concatenate(parts), labels.numpy()
