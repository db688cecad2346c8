"""Likelihood-ratio membership inference with reference models (LiRA).

Carlini, Chien, Nasr, Song, Terzis and Tramer, "Membership Inference Attacks From First
Principles" (2022). N reference models are trained as the attacked one was, each on its own half of
the candidates; for each candidate the statistics of the models that saw it and of those that did
not are modelled as Gaussians, and the attacked model's statistic is held against both (online,
their algorithm 1) or against the second alone (offline, their section VI.D).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import UsageError

Array = NDArray[np.float64]
Fit = Literal["shared", "own"]

MANY = 64
"""From so many reference models on a candidate has means and variances of its own."""


@dataclass(frozen=True)
class References:
    """What N reference models say of m candidates.

    statistics (N, m, q): q numbers a candidate, such as its residual at q times, higher for a
    better fit; inside (N, m): whether the model was trained on the candidate.
    """

    statistics: Array
    inside: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if self.statistics.ndim != 3 or self.statistics.shape[:2] != self.inside.shape:
            raise UsageError(
                f"reference statistics {self.statistics.shape} and memberships "
                f"{self.inside.shape} do not fit; expected (N, m, q) and (N, m)"
            )
        if not np.isfinite(self.statistics).all():
            raise UsageError("a reference model's statistic is not finite")

    @property
    def fit(self) -> Fit:
        """Whether there are models enough for Gaussians of each candidate's own."""
        return "own" if len(self.inside) >= MANY else "shared"


def offline_scores(target: Array, references: References, fit: Fit | None = None) -> Array:
    """How far the attacked model's statistics lie above those of models without the candidate.

    (x - mean_out) / std_out, averaged over the q statistics: the one-sided test of their section
    VI.D, of which the normal distribution function would be the p-value.

    Args:
        target: statistics of the attacked model (m, q).
        references: two models or more; some candidate has models of both kinds, or, where each
            has Gaussians of its own, every candidate has two models of either kind.
        fit: "own": mean and variance of each candidate's models. "shared", for few models: a level
            of each candidate's own, and one variance and one gap between in and out for all (they
            share the variance too, section VI.A). None takes `References.fit`.

    Raises:
        UsageError: too few models, or shapes that do not fit.
    """
    _check(target, references)
    _, (mean, variance) = _gaussians(references, fit or references.fit)
    found: Array = ((target - mean) / np.sqrt(variance)).mean(axis=1)
    return found


def online_scores(target: Array, references: References, fit: Fit | None = None) -> Array:
    """Log p(x | in) - log p(x | out) with the candidate's Gaussians, their algorithm 1.

    The q statistics are taken as independent: what they share scales all candidates' ratios alike.
    Arguments and errors as in `offline_scores`.
    """
    _check(target, references)
    within, without = (
        -0.5 * (np.log(variance) + (target - mean) ** 2 / variance)
        for mean, variance in _gaussians(references, fit or references.fit)
    )
    found: Array = (within - without).sum(axis=1)
    return found


Gaussian = tuple[Array, Array]
"""Means and variances (m, q)."""


def _gaussians(references: References, fit: Fit) -> tuple[Gaussian, Gaussian]:
    """Of models with each candidate, and of those without."""
    if fit == "shared":
        return _shared(references)
    return _own(references, references.inside), _own(references, ~references.inside)


def _own(references: References, chosen: NDArray[np.bool_]) -> Gaussian:
    """Mean and variance of each candidate over the chosen models (N, m)."""
    count = chosen.sum(axis=0)[:, None]
    if count.min(initial=2) < 2:
        raise _few("two reference models of either kind for each candidate")
    weight, values = chosen[..., None], references.statistics
    mean = (values * weight).sum(axis=0) / count
    variance = ((values - mean) ** 2 * weight).sum(axis=0) / (count - 1)
    return mean, _above_zero(variance, mean)


def _shared(references: References) -> tuple[Gaussian, Gaussian]:
    """Levels by candidate, one gap and one variance for all: x = level + gap * inside + noise.

    Least squares: within candidates, deviations of x on deviations of `inside`. A candidate whose
    models are of one kind alone says nothing of the gap, and has a level all the same.
    """
    values, inside = references.statistics, references.inside[..., None].astype(np.float64)
    moved, apart = values - values.mean(axis=0), inside - inside.mean(axis=0)
    weight = float(np.square(apart).sum())
    if weight == 0.0:
        raise _few("some candidate with reference models of both kinds")
    gap = (apart * moved).sum(axis=(0, 1)) / weight  # (q,)
    level = (values - gap * inside).mean(axis=0)
    squares = np.square(moved - gap * apart).sum(axis=(0, 1))
    free = max(1, (len(inside) - 1) * inside.shape[1] - 1)
    variance = _above_zero(np.broadcast_to(squares / free, level.shape), level)
    return (level + gap, variance), (level, variance)


def _above_zero(variance: Array, mean: Array) -> Array:
    """Models that all say the same leave no spread; a small one keeps ratios finite."""
    found: Array = np.maximum(variance, np.maximum(np.square(mean) * 1e-24, 1e-200))
    return found


def _few(needed: str) -> UsageError:
    return UsageError(
        f"likelihood ratios need {needed}", hint="ask for more reference models with --references"
    )


def _check(target: Array, references: References) -> None:
    if target.shape != references.statistics.shape[1:] or not np.isfinite(target).all():
        raise UsageError(
            f"the attacked model's statistics are {target.shape}, expected finite numbers "
            f"{references.statistics.shape[1:]}"
        )
