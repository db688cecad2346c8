"""Samples against held-out real records in one feature space, beside a ceiling and a floor.

The same three measures are taken with real training records (ceiling) and with the plan's public
images (floor) in the samples' place; those figures are kept, keyed by content.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.files import read_json, sha256_bytes
from dpsynth.assess.features import FeatureSpace, content_hash, kept_features, remembered
from dpsynth.assess.metrics import NEIGHBOURS, frechet_distance, precision_recall
from dpsynth.console import Bar
from dpsynth.errors import DpsynthError
from dpsynth.models.lenet import Images, Labels, training_steps
from dpsynth.models.seeding import generator
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.sources import read_public

MOST = 10_000
"""Most images on each side of a comparison; more are thinned evenly."""
MEASURES = ("frechet", "precision", "recall")

Pair = tuple[Images, Labels]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is compared: samples, real records of both sides, and where to say things."""

    verified: VerifiedPlan
    samples: Pair
    train: Pair
    held_out: Pair
    bar: Bar
    notes: list[str] = field(default_factory=list)

    @property
    def classes(self) -> int:
        """The declared number of classes."""
        return len(self.verified.plan.private.classes)

    @property
    def cache(self) -> Path:
        """Where nets and reference figures are kept, in the curator's room."""
        return self.verified.run.curator / "cache"

    @property
    def steps(self) -> int:
        """Optimiser steps of every probe, the ceiling's too."""
        return probe_steps(self.verified, len(self.samples[0]))

    def real_subset(self) -> Pair:
        """As many real training records as there are samples, or all of them if fewer."""
        images, labels = self.train
        order = torch.randperm(len(images), generator=generator(0)).numpy()
        chosen = order[: len(self.samples[0])]
        return images[chosen], labels[chosen]

    def key(self, kind: str, *parts: Any) -> Path:
        """Cache file of figures that depend on the real records, on how many, and on `parts`."""
        digest = content_hash(
            kind, *self.train, *self.held_out, len(self.real_subset()[0]), self.classes, *parts
        )
        return self.cache / f"{kind}-{digest[:32]}.json"


def probe_steps(verified: VerifiedPlan, count: int) -> int:
    """Optimiser steps of a probe beside `count` samples."""
    return training_steps(count, verified.plan.evaluation.probe_epochs)


def compared(job: Job, space: FeatureSpace) -> Figures:
    """Frechet distance, precision and recall of samples, ceiling and floor in one space.

    Each measure maps to {synthetic, ceiling, floor}; a value that needs more images is None and
    a note says so. `frechet` has also `relative`: synthetic over floor.
    """
    real = kept_features(space, thinned(job.held_out[0]), job.cache)
    own = distances(space, space.features(thinned(job.samples[0])), real, job.notes)

    def references() -> Figures:
        ceiling = space.features(thinned(job.real_subset()[0]))
        public = space.features(thinned(read_public(job.verified.plan).images))
        return {
            "ceiling": distances(space, ceiling, real, []),
            "floor": distances(space, public, real, []),
            "n_ceiling": len(ceiling),
            "n_floor": len(public),
        }

    known = remembered(job.key("reference", space.key, _public_key(job.verified)), references)
    result: Figures = {
        name: {"synthetic": own[name], "ceiling": known["ceiling"][name]}
        | {"floor": known["floor"][name]}
        for name in MEASURES
    }
    distance, floor = own["frechet"], known["floor"]["frechet"]
    result["frechet"]["relative"] = distance / floor if distance is not None and floor else None
    result["features"] = {
        "name": space.name,
        "width": space.width,
        "n_synthetic": min(MOST, len(job.samples[0])),
        "n_held_out": len(real),
        "n_ceiling": known["n_ceiling"],
        "n_floor": known["n_floor"],
    }
    return result


def distances(
    space: FeatureSpace, some: NDArray[np.float64], real: NDArray[np.float64], notes: list[str]
) -> Figures:
    """The three measures of features `some` (n, d) against `real` (m, d), None where n or m is low.

    What is left out, and why, is added to `notes`.
    """
    least = min(len(some), len(real))
    values: Figures = dict.fromkeys(MEASURES)
    if least > space.width:
        values["frechet"] = frechet_distance(some, real)
    else:
        notes.append(
            f"no Frechet distance in {space.name}: it needs more than {space.width} images on "
            f"each side, one side has {least}"
        )
    if least > NEIGHBOURS:
        values["precision"], values["recall"] = precision_recall(some, real)
    else:
        notes.append(f"no precision and recall: each side needs more than {NEIGHBOURS} images")
    return values


def thinned(images: Images) -> Images:
    """At most `MOST` images, evenly spaced."""
    if len(images) <= MOST:
        return images
    return images[np.linspace(0, len(images) - 1, MOST).round().astype(np.int64)]


def _public_key(verified: VerifiedPlan) -> str:
    """Content hash of the public images that pretraining used; without it, of the images read."""
    try:
        used = read_json(verified.run.calibration)["sources"]
    except (DpsynthError, KeyError):
        return content_hash(read_public(verified.plan).images)
    return sha256_bytes(repr(used).encode())
