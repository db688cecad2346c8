"""Fair bits behind Gaussian noise: the likelihood ratio of each one, the others unknown.

What a Gaussian mechanism shows of m planted canaries is r = C b + s e in units of its noise:
column c_i of C is what canary i adds, b its fair bits, e ~ N(0, I). Were the other bits known, the
likelihood ratio of b_i would be r' c_i - |c_i|^2 / 2 with r the rest (Neyman and Pearson: no test
is better; s = 1). They are not, and count as noise of covariance C_-i C_-i' / 4 beside s^2 I:

    LLR_i = c_i' K_i^-1 (r - C 1/2),   K_i = s^2 I + C_-i C_-i' / 4,

the linear minimum-mean-square-error detector of multiuser detection (Verdu 1998, section 6.2),
with its own bit left out of the prior. Equal to the exact ratio where canaries are orthogonal. All
of it is computed from C'C (m, m) and C'r (m,), never in the many coordinates of r.

s is 1 for an honest mechanism. It is taken from r itself, by the largest likelihood: noise that is
smaller than promised, or absent, is then used by the attack and not missed. So are contributions
that are longer than promised.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from dpsynth.errors import UsageError

Array = NDArray[np.float64]

PRIOR = 0.25
"""Variance of a fair bit."""
# log of s^2, between which the likeliest is sought: from none to twice the promised deviation.
_LOW, _HIGH = np.log(1e-12), np.log(4.0)
# Contributions longer than they may be, by which power of 4 their square is, and how much likelier
# this must make r to be believed: honest noise alone never does.
_LONGER = 4.0 ** np.arange(9)
_SURELY = 20.0


@dataclass(frozen=True)
class Sighting:
    """r = C b + s e, by what the detector needs of it.

    gram C'C (m, m); match C'r (m,); energy |r|^2; size: numbers in r. Independent sightings of
    the same bits add up.
    """

    gram: Array
    match: Array
    energy: float
    size: int

    def __post_init__(self) -> None:
        count = len(self.match)
        if self.match.ndim != 1 or count < 1 or self.gram.shape != (count, count):
            raise UsageError(
                f"a Gram matrix {self.gram.shape} and products {self.match.shape} do not fit"
            )

    def __add__(self, other: "Sighting") -> "Sighting":
        """Both together, of one set of canaries."""
        return Sighting(
            self.gram + other.gram,
            self.match + other.match,
            self.energy + other.energy,
            self.size + other.size,
        )

    @classmethod
    def of(cls, contributions: Array, residual: Array) -> "Sighting":
        """From C' (m, k), a row a canary, and r (k,), both in units of the noise."""
        return cls(
            contributions @ contributions.T,
            contributions @ residual,
            float(residual @ residual),
            len(residual),
        )


def known_rest(contributions: Array, residual: Array) -> Array:
    """Log p(r | b_i = 1) - log p(r | b_i = 0) of a Gaussian mechanism, nothing else unknown.

    The optimal test of one record (Neyman and Pearson); its ROC curve is the mechanism's own
    trade-off curve G_mu with mu = |c_i| (Dong, Roth and Su 2022, section 2.3), of which
    AUC = Phi(mu / sqrt 2).

    Args:
        contributions: c_i (m, k) in units of the noise.
        residual: r - (what all others add), one for each (m, k), or the same for all (k,).

    Returns:
        Ratios (m,); under b_i = 0 they are N(-mu^2 / 2, mu^2), under b_i = 1 N(mu^2 / 2, mu^2).
    """
    found: Array = (contributions * residual).sum(axis=1)
    found -= 0.5 * np.square(contributions).sum(axis=1)
    return found


@dataclass(frozen=True)
class _Spectrum:
    """A sighting in the basis where its Gram matrix is diagonal, half of every bit taken off."""

    values: Array  # eigenvalues of C'C (r,), all above rounding
    vectors: Array  # (m, r)
    inside: Array  # coordinates of r - C 1/2 in the span of C (r,)
    outside: float  # energy of the rest
    free: int  # dimensions of the rest

    @classmethod
    def of(cls, sighting: Sighting) -> "_Spectrum":
        half = np.full(len(sighting.match), 0.5)
        match = sighting.match - sighting.gram @ half
        energy = sighting.energy - 2 * half @ sighting.match + half @ sighting.gram @ half
        values, vectors = np.linalg.eigh(sighting.gram)
        kept = values > max(values[-1], 0.0) * 1e-12
        values, vectors = values[kept], vectors[:, kept]
        inside = (vectors.T @ match) / np.sqrt(values)
        # A difference of large numbers: rounding leaves a trace of them at most.
        outside = max(float(energy - inside @ inside), 1e-13 * abs(energy))
        return cls(values, vectors, inside, outside, max(0, sighting.size - len(values)))

    def likelihood(self, level: float, prior: float) -> float:
        """Log p(r) up to a constant, for noise s^2 = `level` and bits as N(1/2, prior)."""
        spread = level + prior * self.values
        fits = float((np.log(spread) + self.inside**2 / spread).sum())
        return -0.5 * (fits + self.free * float(np.log(level)) + self.outside / level)

    def level(self, prior: float) -> tuple[float, float]:
        """The likeliest s^2, and log p(r) there."""
        steps = np.linspace(_LOW, _HIGH, 60)
        found = [self.likelihood(float(np.exp(step)), prior) for step in steps]
        at = int(np.argmax(found))
        ends = (steps[max(at - 1, 0)], steps[min(at + 1, len(steps) - 1)])
        best = minimize_scalar(
            lambda step: -self.likelihood(float(np.exp(step)), prior), bounds=ends, method="bounded"
        )
        return float(np.exp(best.x)), -float(best.fun)

    def likeliest(self) -> tuple[float, float]:
        """s^2 and the bits' variance: 1/4, or more where contributions are surely too long."""
        level, likely = self.level(PRIOR)
        prior = PRIOR
        for factor in _LONGER[1:].tolist():
            other, more = self.level(PRIOR * factor)
            if more > likely + _SURELY:
                level, likely, prior = other, more, PRIOR * factor
        return level, prior


@dataclass(frozen=True)
class Noise:
    """Noise seen over noise promised: `variance`, 1 if honest, with the deviation of that figure.

    The deviation is that of a variance of as many normal numbers as there are beyond the canaries'
    span: infinite where there are none.
    """

    variance: float
    deviation: float

    @property
    def short(self) -> bool:
        """Whether there is less noise than promised, surely: by six deviations and 2%."""
        return self.variance < 1.0 - 6.0 * self.deviation - 0.02


def noise_level(sighting: Sighting) -> Noise:
    """s^2 by the largest likelihood: near 1 where noise is as promised, near 0 without any."""
    spectrum = _Spectrum.of(sighting)
    level, _ = spectrum.likeliest()
    deviation = float(np.sqrt(2.0 / spectrum.free)) if spectrum.free else float("inf")
    return Noise(level, deviation)


def bit_scores(sighting: Sighting, level: float | None = None) -> Array:
    """LLR_i of the module's first lines (m,), higher for a bit that is rather 1.

    A canary that adds nothing scores 0.

    Args:
        sighting: of all canaries, by all mechanisms that saw them.
        level: s^2; None takes the likeliest. Where contributions are surely longer than they may
            be, the bits' variance grows with them.
    """
    spectrum = _Spectrum.of(sighting)
    level, prior = spectrum.likeliest() if level is None else (level, PRIOR)
    weights = 1.0 / (level + prior * spectrum.values)
    # C'K^-1(r - C/2) and the diagonal of C'K^-1 C, with K = s^2 I + prior C C'.
    pull = spectrum.vectors @ (weights * np.sqrt(spectrum.values) * spectrum.inside)
    held = (spectrum.vectors**2) @ (weights * spectrum.values)
    # The bit's own part of the prior is taken out again (a rank-one update). prior * held < 1, up
    # to rounding where there is next to no noise.
    found: Array = pull / np.maximum(1.0 - prior * held, 1e-12)
    return found
