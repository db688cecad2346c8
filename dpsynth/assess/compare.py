"""Samples against held-out real records in one feature space, beside a ceiling and a floor.

The same measures are taken with real training records (ceiling) and with public images (floor) in
the samples' place; those figures are kept, keyed by content, where there is a place to keep them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.files import read_json, sha256_bytes
from dpsynth.assess.attributes import Captioned
from dpsynth.assess.bootstrap import Interval, frechet_interval, per_class_frechet_interval
from dpsynth.assess.counts import refusal, shortage
from dpsynth.assess.density import K_DENSITY, Measured, neighbourhood
from dpsynth.assess.diversity import diversity_interval, within_class
from dpsynth.assess.features import FeatureSpace, content_hash, kept_features, remembered
from dpsynth.assess.kernel import kernel_distance, kernel_interval
from dpsynth.assess.metrics import (
    NEIGHBOURS,
    frechet_distance,
    per_class_frechet,
    precision_recall,
)
from dpsynth.errors import DpsynthError
from dpsynth.models.lenet import Images, Labels, training_steps
from dpsynth.models.seeding import generator
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.sources import read_public

MOST = 10_000
"""Most images on each side of a comparison; more are thinned evenly."""
BALLS = ("precision", "recall", "density", "coverage")
MEASURES = ("frechet", *BALLS, "kernel", "per_class_frechet", "diversity")

BY_CLASS = ("per_class_frechet", "diversity")
"""Those that have a value of each class too."""

Pair = tuple[Images, Labels]
Figures = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """What is compared, and where what is learned of real records may be kept.

    Attributes:
        names: the declared classes; empty where there are none.
        samples: images uint8 (n, H, W, C) and labels (n,); labels are -1 in a set without any.
        train: real records of the side that may have been learned from; for the ceiling.
        held_out: the real records that everything is compared with.
        public: reads the images of the floor, uint8 (k, H, W, C).
        public_key: content hash of those images.
        probe_epochs: passes of a probe over the samples.
        captioned: samples, training and held-out records with their captions; None where there are
            no captions.
        cache: folder for nets and figures of ceiling and floor; None keeps none.
        notes: what was left out or is doubtful, and why.
    """

    names: tuple[str, ...]
    samples: Pair
    train: Pair
    held_out: Pair
    public: Callable[[], Images]
    public_key: Callable[[], str]
    probe_epochs: int
    captioned: tuple[Captioned, Captioned, Captioned] | None = None
    cache: Path | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def classes(self) -> int:
        """The declared number of classes."""
        return len(self.names)

    @property
    def steps(self) -> int:
        """Optimiser steps of every LeNet probe, the ceiling's too."""
        return training_steps(len(self.samples[0]), self.probe_epochs)

    def real_subset(self) -> Pair:
        """As many real training records as there are samples, or all of them if fewer."""
        images, labels = self.train
        order = torch.randperm(len(images), generator=generator(0)).numpy()
        chosen = order[: len(self.samples[0])]
        return images[chosen], labels[chosen]

    def kept(self, kind: str, make: Callable[[], Figures], *parts: Any) -> Figures:
        """Figures that depend on the real records, on how many samples there are, and on `parts`.

        Made once where there is a cache, else made now.
        """
        if self.cache is None:
            return make()
        digest = content_hash(
            kind, *self.train, *self.held_out, len(self.real_subset()[0]), self.classes, *parts
        )
        return remembered(self.cache / f"{kind}-{digest[:32]}.json", make)

    def short(self, measure: str, n: int, m: int, space: "FeatureSpace | None" = None) -> None:
        """Note where `measure` has no value at n and m images, or one of little worth."""
        said = shortage(measure, n, m, 0 if space is None else space.width)
        if said is not None:
            self.notes.append(said if space is None else f"{said} ({space.short})")


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of a comparison: features (n, d), labels (n,) or -1."""

    features: NDArray[np.float64]
    labels: Labels

    @property
    def labelled(self) -> bool:
        return len(self.labels) > 0 and bool(self.labels.min() >= 0)


def probe_steps(verified: VerifiedPlan, count: int) -> int:
    """Optimiser steps of a probe beside `count` samples."""
    return training_steps(count, verified.plan.evaluation.probe_epochs)


def compared(job: Job, space: FeatureSpace) -> Figures:
    """Every measure of one space, of samples, ceiling and floor, with the samples' intervals.

    Each of `MEASURES` maps to {synthetic, ceiling, floor, interval, ...}. A value that needs more
    images is None and a note says so. `frechet` has also `relative`: synthetic over floor.
    """
    held, own_labels = thinned(job.held_out[0]), thinned(job.held_out[1])
    real = _Side(kept_features(space, held, job.cache), own_labels)
    some = _Side(space.features(thinned(job.samples[0])), thinned(job.samples[1]))
    own = _measured(space, some, real, job, told=True)

    def references() -> Figures:
        images, labels = job.real_subset()
        ceiling = _Side(space.features(thinned(images)), thinned(labels))
        public = space.features(thinned(job.public()))
        floor = _Side(public, np.full(len(public), -1, np.int64))
        found: Figures = {"n_ceiling": len(images), "n_floor": len(public)}
        for name, side in (("ceiling", ceiling), ("floor", floor)):
            figures = _measured(space, side, real, job, told=False)
            found[name] = {key: figures[key]["synthetic"] for key in MEASURES}
            found[name] |= {f"{key}_by_class": figures[key]["by_class"] for key in BY_CLASS}
        return found

    known = job.kept("references-2", references, space.key, job.public_key())
    counts = {
        "synthetic": len(some.features),
        "held_out": len(real.features),
        "ceiling": min(MOST, known["n_ceiling"]),
        "floor": known["n_floor"],
    }
    result: Figures = {
        name: own[name]
        | {"ceiling": known["ceiling"][name], "floor": known["floor"][name]}
        | {"n": counts, "features": space.name}
        for name in MEASURES
    }
    for name in BY_CLASS:
        result[name]["ceiling_by_class"] = known["ceiling"][f"{name}_by_class"]
    # Copies of one image: no distance at all. Public images have other classes.
    result["diversity"]["floor"] = 0.0
    distance, floor = own["frechet"]["synthetic"], known["floor"]["frechet"]
    result["frechet"]["relative"] = distance / floor if distance is not None and floor else None
    result["features"] = {"name": space.name, "width": space.width} | {
        f"n_{side}": count for side, count in counts.items()
    }
    return result


def _measured(space: FeatureSpace, some: _Side, real: _Side, job: Job, *, told: bool) -> Figures:
    """All measures of `some` against `real` as {synthetic, interval, ...}; `told`: with notes.

    Ceiling and floor are told nothing and need no interval of their own.
    """
    counts = len(some.features), len(real.features)

    def possible(*measures: str) -> bool:
        for measure in measures if told else ():
            job.short(measure, *counts, space)
        return all(refusal(measure, *counts, space.width) is None for measure in measures)

    found: Figures = {name: figure(None) for name in MEASURES}
    if possible("frechet"):
        found["frechet"] = _frechet(some, real)
    if possible(*BALLS):
        balls = neighbourhood(some.features, real.features, k=NEIGHBOURS, k_density=K_DENSITY)
        found |= {name: _ball(getattr(balls, name)) for name in BALLS}
    elif refusal("precision", *counts, space.width) is None:
        values = precision_recall(some.features, real.features)
        found |= {name: figure(value) for name, value in zip(BALLS, values, strict=False)}
    if possible("kernel"):
        found["kernel"] = _kernel(some, real, interval=told)
    found["per_class_frechet"] = _by_class(some, real, job, told=told)
    found["diversity"] = _diversity(some, job)
    return found


def figure(value: float | None, interval: Interval | None = None, **more: Any) -> Figures:
    """One measure of the samples as the report has it, without its ceiling and floor."""
    how = None if interval is None else interval.to_json()
    bounds = None if how is None else [how.pop("low"), how.pop("high")]
    return {"synthetic": value, "interval": bounds, "interval_how": how, **more}


def _ball(measured: Measured) -> Figures:
    return figure(measured.value, measured.interval)


def _frechet(some: _Side, real: _Side) -> Figures:
    value = frechet_distance(some.features, real.features)
    spread = frechet_interval(some.features, real.features)
    beyond = [spread.beyond.low, spread.beyond.high]
    return figure(value, spread.here, unbiased=spread.unbiased, unbiased_interval=beyond)


def _kernel(some: _Side, real: _Side, *, interval: bool) -> Figures:
    found = kernel_distance(some.features, real.features)
    spread = kernel_interval(some.features, real.features) if interval else None
    more = found.to_json()
    return figure(more.pop("mean"), spread, **more)


def _by_class(some: _Side, real: _Side, job: Job, *, told: bool) -> Figures:
    """Mean over classes of the Frechet distance inside each (StraightDP, D.1, Table 5)."""
    if not (some.labelled and real.labelled):
        return figure(None, by_class=None)
    sides = (some.features, some.labels, real.features, real.labels, job.classes)
    width = some.features.shape[1]
    values = per_class_frechet(*sides)
    known = [value for value in values if value is not None]
    if len(known) < len(values) and told:
        missing = len(values) - len(known)
        job.notes.append(
            f"no Frechet distance inside {missing} of {len(values)} classes: each needs more than "
            f"{width} images of it on each side"
        )
    # A mean over some of the classes would be another measure under the same name.
    mean = float(np.mean(known)) if len(known) == len(values) else None
    interval = per_class_frechet_interval(*sides) if mean is not None else None
    found = figure(mean, interval, by_class=dict(zip(job.names, values, strict=True)))
    if mean is None:
        found["note"] = f"needs more than {width} images of each class on each side"
    return found


def _diversity(some: _Side, job: Job) -> Figures:
    if not some.labelled:
        return figure(None, by_class=None)
    values = within_class(some.features, some.labels, job.classes)
    known = [value for value in values if value is not None]
    mean = float(np.mean(known)) if known else None
    interval = diversity_interval(some.features, some.labels, job.classes)
    return figure(mean, interval, by_class=dict(zip(job.names, values, strict=True)))


def thinned(rows: NDArray[Any]) -> NDArray[Any]:
    """At most `MOST` rows, evenly spaced."""
    if len(rows) <= MOST:
        return rows
    return rows[np.linspace(0, len(rows) - 1, MOST).round().astype(np.int64)]


def public_key(verified: VerifiedPlan) -> str:
    """Content hash of the public images that pretraining used; without it, of the images read."""
    try:
        used = read_json(verified.run.calibration)["sources"]
    except (DpsynthError, KeyError):
        return content_hash(read_public(verified.plan, verified.run).images)
    return sha256_bytes(repr(used).encode())
