"""Time-heterogeneous allocation: how DP-SGD's clip and noise may differ by time bucket.

The plan's section, the public profile that `pretrain` measures, and what follows from it: one
clip a bucket for each shape, and a score. Nothing here knows private data (StraightDP, B.5;
derivations in docs/maths/planner.md).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dpsynth.accounting.checks import AccountingError, positive, positives
from dpsynth.artifacts.files import canonical_json, sha256_bytes
from dpsynth.errors import UsageError
from dpsynth.planning.section import Section

if TYPE_CHECKING:
    from dpsynth.planning.training import Distillation, Train

SHAPES = (0.0, 0.25, 0.5, 0.75, 1.0)
Shape = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

LATEST = 1 - 1e-3
"""End of the last time bucket: at t = 1 only the noise of the target is left to learn."""
LATEST_HORIZON = 0.9
"""Private training always covers at least [0.9, 1)."""
DIGITS = 6
"""Of a clip. Shapes are rounded, so that every machine makes the same clips of one profile."""
FORMAT = "dpsynth-profile-1"


class Allocation(Section):
    """The shape family of the planner (StraightDP, appendix B.5): one candidate for each beta.

    beta 0 is the uniform plan, which is always in the family.
    """

    shapes: Annotated[list[Shape], Field(min_length=1)] = Field(list(SHAPES))

    @property
    def family(self) -> tuple[float, ...]:
        """Every beta once, in rising order, 0 among them.

        >>> Allocation(shapes=[1.0, 0.5, 1.0]).family
        (0.0, 0.5, 1.0)
        """
        return tuple(sorted({0.0, *map(float, self.shapes)}))


@dataclass(frozen=True)
class Profile:
    """What public data say of each time bucket; `pretrain` writes it into the calibration.

    edges (K + 1,): of the buckets, from where training starts to `LATEST`. variance, weight (K,):
    averages of V(t) and of the loss weighting w(t). importance (K,): average of w V / (1 - t)^2,
    the part of the loss that no model can predict. weights: number of trained weights.
    """

    tau: float
    edges: tuple[float, ...]
    variance: tuple[float, ...]
    weight: tuple[float, ...]
    importance: tuple[float, ...]
    weights: int

    def to_json(self) -> dict[str, Any]:
        """The profile as plain JSON values."""
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"format": FORMAT, **lists}

    @property
    def digest(self) -> str:
        """SHA-256 of the profile, in hex: what a lock names."""
        return sha256_bytes(canonical_json(self.to_json()))

    @classmethod
    def from_json(cls, found: object) -> "Profile":
        """Inverse of `to_json`. UsageError for anything else."""
        try:
            return cls._read(found)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                "the profile of the time buckets in public/calibration.json is damaged",
                hint="dpsynth pretrain RUN, after removing public/calibration.json",
            ) from error

    @classmethod
    def _read(cls, found: Any) -> "Profile":
        known = dict(found)
        if known.pop("format") != FORMAT:
            raise TypeError("another format")
        names = ("variance", "weight", "importance")
        low, *later = known.pop("edges")
        # The first edge may be 0, which is no positive number.
        edges = (positive("edge", low) if low != 0 else 0.0, *positives("edges", later))
        lists = {name: positives(name, known.pop(name)) for name in names}
        tau, weights = positive("tau", known.pop("tau")), known.pop("weights")
        rising = all(a < b for a, b in pairwise(edges))
        sizes = {len(numbers) for numbers in lists.values()}
        whole = isinstance(weights, int) and not isinstance(weights, bool) and weights > 0
        if known or sizes != {len(edges) - 1} or not rising or not whole or edges[-1] > 1:
            raise TypeError("fields do not fit")
        return cls(tau, edges, weights=weights, **lists)

    def fits(self, buckets: int, distillation: "Distillation | None") -> bool:
        """Whether the buckets are those of a plan with these settings."""
        return self.edges == bucket_edges(trains_from(distillation, self.tau), buckets)


def trains_from(distillation: "Distillation | None", tau: float) -> float:
    """The time from which private training goes on, by the plan and the public `tau`.

    At the horizon up to which the start weights were distilled, so that no private gradient
    targets what was taught already. After a field taught for (nearly) all t at tau, at most 0.9:
    training then covers what public data says no Gaussian field describes well. Without
    distillation at 0.
    """
    if distillation is None:
        return 0.0
    horizon = horizon_of(distillation, tau)
    return horizon if horizon < LATEST_HORIZON else min(tau, LATEST_HORIZON)


def horizon_of(distillation: "Distillation", tau: float) -> float:
    """The declared horizon, or the public cosine knee `tau`, capped."""
    declared = distillation.horizon
    return min(tau if declared == "knee" else declared, distillation.cap)


def bucket_edges(low: float, buckets: int) -> tuple[float, ...]:
    """Edges (K + 1,) of K equal buckets on [low, LATEST].

    >>> [round(edge, 3) for edge in bucket_edges(0.099, 3)]
    [0.099, 0.399, 0.699, 0.999]
    """
    width = (LATEST - low) / buckets
    return tuple(low + number * width for number in range(buckets + 1))


def clips_of(profile: Profile, beta: float, reference: float) -> tuple[float, ...]:
    """Clips C_k (K,) of shape `beta`, their root mean square the plan's `reference` (P3).

        C_k = C_ref h_k^beta / rms(h^beta),   h_k = sqrt(importance_k)

    Six significant digits; the uniform plan (beta 0) has the reference itself in every bucket.

    >>> profile = Profile(0.2, (0.2, 0.6, 0.999), (4.0, 1.0), (1.0, 1.0), (1.0, 7.0), 10)
    >>> clips_of(profile, 0.0, 1.0), clips_of(profile, 1.0, 1.0)
    ((1.0, 1.0), (0.5, 1.32288))
    """
    if beta == 0:
        return (float(reference),) * len(profile.importance)
    largest = max(profile.importance)  # first, so that nothing overflows
    shape = [(one / largest) ** (beta / 2) for one in profile.importance]
    size = math.sqrt(math.fsum(one * one for one in shape) / len(shape))
    return tuple(float(f"{reference * one / size:.{DIGITS}g}") for one in shape)


def utility(profile: Profile, clips: Sequence[float], noise: float, reference: float) -> float:
    """Public score U in [0, 1] of clips C_k under `noise` (P4); never computed from private data.

        U = sum_k i_k A_k^2 / (A_k^2 + P noise^2) / sum_k i_k,   A_k = min(C_k, g_k)

    i_k: the profile's importance, g_k = C_ref sqrt(i_k / mean(i)): a gradient's size in bucket k
    when the reference clip is its usual size; P: number of weights; noise: standard deviation of
    the noise on an entry of the mean gradient. It is the share of a step's best decrease of the
    loss that clip and noise leave.

    >>> profile = Profile(0.2, (0.2, 0.6, 0.999), (4.0, 1.0), (1.0, 1.0), (1.0, 7.0), 10)
    >>> utility(profile, (1.0, 1.0), 0.0, 1.0)
    1.0
    >>> utility(profile, (0.5, 1.32288), 0.3, 1.0) > utility(profile, (1.0, 1.0), 0.3, 1.0)
    True
    """
    largest = max(profile.importance)
    share = [one / largest for one in profile.importance]
    mean = math.fsum(share) / len(share)
    energy = profile.weights * noise * noise
    kept = []
    for one, clip in zip(share, clips, strict=True):
        signal = min(clip, reference * math.sqrt(one / mean)) ** 2
        whole = signal + energy
        kept.append(one * (signal / whole) if whole > 0 else 0.0)
    return math.fsum(kept) / math.fsum(share)


def held_clips(found: object, settings: "Train") -> tuple[float, ...] | None:
    """The clips in a lock's `allocation`; None unless they may be those of `settings`.

    They must be one a bucket, of the plan's reference in root mean square, and of a shape in its
    family; all equal for the uniform one, and before there is a profile.
    """
    allocation, reference = settings.allocation, settings.clip
    if allocation is None or not isinstance(found, dict):
        return None
    try:
        clips, beta = positives("clips", found["clips"]), found["beta"]
    except (KeyError, AccountingError):
        return None
    named = found.get("profile")
    if named is None or beta == 0:
        good = beta == 0 and clips == (float(reference),) * settings.buckets
    else:
        size = math.sqrt(math.fsum((one / reference) ** 2 for one in clips) / len(clips))
        good = beta in allocation.family and abs(size - 1) < 10.0 ** (1 - DIGITS)
    known = named is None or (isinstance(named, str) and re.fullmatch("[0-9a-f]{64}", named))
    return clips if good and known and len(clips) == settings.buckets else None


def profile_in(calibration: Mapping[str, Any]) -> Profile | None:
    """The profile in a calibration; None where it has none. UsageError for a damaged one."""
    found = calibration.get("profile")
    return None if found is None else Profile.from_json(found)
