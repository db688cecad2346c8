"""Private training of a world's model by the real steps: on records, or with gradient canaries."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import nn

from dpsynth.accounting.statistics import BucketedGradientSums, Statistic
from dpsynth.assess.audit.chain import Bench, prior_of
from dpsynth.assess.audit.rounds import Charge, Source
from dpsynth.assess.audit.whitebox import (
    Planted,
    PlantedClipper,
    WatchedState,
    spread_coordinates,
)
from dpsynth.assess.audit.worlds import Control, Mask, WhiteBox
from dpsynth.errors import PlanError, typed
from dpsynth.models.trainable import train_only
from dpsynth.planning.allocation import trains_from
from dpsynth.planning.training import Train
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.flow_task import codes_in
from dpsynth.private.optimisers import gradient_noise
from dpsynth.private.steps import Workload, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState

Advance = Callable[[], None]


@dataclass(frozen=True)
class Hooks:
    """What a world's training is given: noise by slot, the charge of a slot, a call a step."""

    source: Source
    charge: Charge
    advance: Advance


@dataclass(frozen=True)
class Trained:
    """A trained model, and what its steps showed at the canaries' weights, if there were any."""

    model: nn.Module
    low: float
    gradients: WhiteBox | None = None


def train_records(
    bench: Bench,
    start: nn.Module,
    chunks: Iterable[UnitCodes],
    *,
    hooks: Hooks,
) -> Trained:
    """Private training of `start` on the units of `chunks`, with the lock's noise."""
    settings, work = _workload(bench, start)
    noise = gradient_noise(bench.lock.stage_slots("train"), work.capacity)
    state = TrainingState(start, settings, noise)
    slots = bench.lock.stage_slots("train")
    data = None
    with PerExampleClipper(start, flow_losses, settings.clip) as clipper:
        for slot in slots:
            hooks.charge(slot)
            data = codes_in(chunks, bench.representation) if data is None else data
            own = hooks.source(slot.name)
            run_chunk(slot, data, work, state, clipper=clipper, noise=own, advance=hooks.advance)
    return Trained(state.averaged(), work.low)


def train_gradients(
    bench: Bench,
    chunks: Iterable[UnitCodes],
    included: Mask,
    *,
    control: Control | None,
    hooks: Hooks,
) -> Trained:
    """Private training from the public prior, the included canaries planted as Dirac gradients.

    The start matters little to who sees gradients, so no distillation is waited for.
    """
    model = prior_of(bench.run, bench.plan)
    settings, work = _workload(bench, model)
    slots = bench.lock.stage_slots("train")
    rate, std = slots[0].rate or 1.0, slots[0].noise_std
    where = spread_coordinates(model, len(included))
    noise = gradient_noise(slots, work.capacity)
    divisor = rate * work.capacity
    state = WatchedState(model, settings, noise, coordinates=where, divisor=divisor)
    clips, planted, clipper = list[float](), None, None
    for slot in slots:
        hooks.charge(slot)
        if planted is None or clipper is None:
            data = codes_in(chunks, bench.representation)
            planted = Planted.among(data, included, bench.representation.radius)
            clipper = PlantedClipper(model, planted, where, settings, control=control)
        own = hooks.source(slot.name)
        run_chunk(
            slot, planted.data, work, state, clipper=clipper, noise=own, advance=hooks.advance
        )
        clips += _clips(slot.statistic, slot.steps or 0, settings.clip)
    known = 0.0 if clipper is None else clipper.known
    seen = WhiteBox(state.seen - known, np.array(clips), std, rate)
    return Trained(state.averaged(), work.low, seen)


def _workload(bench: Bench, model: nn.Module) -> tuple[Train, Workload]:
    """The plan's train stage, with all weights frozen but those that it moves."""
    plan, settings = bench.plan, bench.plan.stages.train
    if settings is None:
        raise PlanError("this plan has no train stage")
    train_only(model, settings.parameters)
    private = plan.private
    return settings, Workload(settings, private.capacity, private.conditions, low_of(bench))


def _clips(statistic: Statistic, steps: int, clip: float) -> list[float]:
    """The clip of each step of a chunk."""
    if isinstance(statistic, BucketedGradientSums):
        return [statistic.clip_of(step) for step in range(steps)]
    return [clip] * steps


def low_of(bench: Bench) -> float:
    """The time from which private training goes on."""
    settings = bench.plan.distillation
    low = 0.0 if settings is None else trains_from(settings, bench.tau)
    edges = (bench.lock.allocation or {}).get("edges")
    if edges is not None and edges[0] != low:
        raise PlanError(
            f"training goes on from t = {low:g}, and the lock's time buckets begin at {edges[0]:g}",
            hint=typed("dpsynth", "pretrain", bench.run.root),
        )
    return low
