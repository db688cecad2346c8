"""How many means a release of first moments has: one for each class, or one for all records.

Decided from declared values and the stage's noise alone, never from the records: the lock's
statistic says it (`ClassMeans.classes`), and it follows from the lock (`workload.follows`).
"""

import math
from collections.abc import Iterator

from dpsynth.accounting.queries import ClassMeans
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.planning.release import Moments
from dpsynth.planning.schema import Plan

LARGEST = 0.1
"""Of `groups: auto`: by class where the noise of a class mean is at most so many clip radii."""
MEANS = "means"
"""Name of the note, and of what it tells in `plan --json`."""


def mean_groups(
    moments: Moments,
    *,
    classes: int,
    capacity: int,
    dim: int,
    weight: float,
    multiplier: float | None,
) -> int:
    """Groups whose means are released: `classes`, or 1 for all records together.

    Args:
        moments: the stage, with covariance `public`.
        classes: declared classes (conditions).
        capacity: the declared N.
        dim: numbers of a released code.
        weight: b, the whitened weight of sums.
        multiplier: noise of the stage over its sensitivity; None: the most groups that any
            noise may lead to, for what has to be paid beforehand.
    """
    if moments.groups == "all":
        return 1
    if moments.groups == "class" or multiplier is None:
        return classes
    noise = mean_noise(multiplier, weight, dim, capacity / classes)
    return classes if noise <= LARGEST else 1


def mean_noise(std: float, weight: float, dim: int, records: float) -> float:
    """Expected length of a mean's noise in clip radii, of a group of so many records.

    The sum of codes has noise `std` / `weight` radii in each of `dim` numbers
    (docs/maths/moments.md, M6).

    >>> round(mean_noise(2.0, 0.95, 64, 20), 3), round(mean_noise(2.0, 0.95, 64, 2040), 4)
    (0.842, 0.0083)
    """
    return std / weight * math.sqrt(dim) / records


def means_facts(lock: Lock) -> dict[str, object] | None:
    """What was decided, and from what; None for a lock without a release of means alone."""
    slot = _released(lock)
    if slot is None or not isinstance(slot.statistic, ClassMeans):
        return None
    means, private = slot.statistic, Plan.of_facts(lock.facts).private

    def noise(groups: int) -> float:
        return mean_noise(slot.noise_std, means.sum, means.dim, private.capacity / groups)

    return {
        "groups": lock.facts["stages"]["moments"].get("groups", "class"),
        "means": means.classes,
        "noise": noise(means.classes),
        "noise_by_class": noise(private.conditions),
    }


def means_notes(lock: Lock) -> Iterator[str]:
    """One line below the table of `dpsynth plan`."""
    facts = means_facts(lock)
    if facts is None:
        return
    own, by_class = f"{facts['noise']:.3g}", f"{facts['noise_by_class']:.3g}"
    auto = facts["groups"] == "auto"
    if facts["means"] == 1:
        why = f" (auto: of a class mean {by_class}, above {LARGEST:g})" if auto else ""
        yield f"means: one for all records, its noise of length {own} clip radii{why}"
    else:
        why = f" (auto: at most {LARGEST:g})" if auto else ""
        yield (
            f"means: one for each of {facts['means']} classes, the noise of an average one of "
            f"length {own} clip radii{why}"
        )


def _released(lock: Lock) -> Slot | None:
    means = (slot for slot in lock.stage_slots("moments") if isinstance(slot.statistic, ClassMeans))
    return next(means, None)
