"""What an attack sees of an audit: one world, built under the plan with canaries planted.

Threat: the adversary knows every record, the plan, and each canary, and sees what the world shows
him (`Observed`). Unknown to him are the canaries' inclusion bits alone, which are independent fair
coins (Steinke, Nasr and Jagielski 2023, section 3).
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpsynth.artifacts.lock import Slot
from dpsynth.planning.schema import Plan

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Pair = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images uint8 (n, H, W, C) and labels int64 (n,)."""

Control = Literal["no-noise", "no-clip", "noise-reused", "copied-record"]
CONTROLS: tuple[Control, ...] = ("no-noise", "no-clip", "noise-reused", "copied-record")
CONTROL_EPSILON = 1.0
"""Total epsilon that the plan is planned at again for its controls: a bound above it is in reach
of 200 canaries."""

Kind = Literal["records", "gradients"]


@dataclass(frozen=True)
class Canaries:
    """The m canaries of a world, and what no attack may read: `included`.

    images uint8 (m, H, W, C); labels int64 (m,), classes or conditions; codes float64 (m, d) as
    private training takes them (on the clip's grid, inside the ball R, in real units).
    included bool (m,): fair coins from the system.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    codes: Array
    included: Mask

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Statistic:
    """One noisy block of one release, and what each canary adds to it. All in real units.

    release: "moments", "cells-lloyd-1", "cells"; part: "counts", "sums", "diagonal" (of second
    moments), "off-diagonal" (their upper triangle, row by row). Blocks come in the order in which
    their noise was drawn, and entries within a block too: where noise is reused, every block's
    noise is the beginning of one and the same sequence, times its own `std`.

    noisy (k,): as released; known (k,): exact sums of all records but the canaries; std: of one
    entry's noise. Canary i, if included, adds values[i] (w,) at the entries places[i] (w,), and
    nothing elsewhere; places int64 (m, w), values float64 (m, w).
    """

    release: str
    part: str
    noisy: Array
    known: Array
    std: float
    places: NDArray[np.int64]
    values: Array

    @property
    def residual(self) -> Array:
        """(noisy - known) / std (k,): the included canaries' parts / std, plus N(0, 1) noise."""
        found: Array = (self.noisy - self.known) / self.std
        return found

    @property
    def parts(self) -> Array:
        """Values / std (m, w): what a canary adds to `residual` at `places`."""
        found: Array = self.values / self.std
        return found


@dataclass(frozen=True)
class WhiteBox:
    """What an adversary sees who sees every noisy gradient, at the canaries' coordinates.

    Canary i, if included, is a unit whose gradient is C (1 - 2^-10) at its coordinate and zero
    elsewhere (a Dirac gradient: Nasr et al. 2023; Steinke et al. 2023, section 6); it joins a step
    by the step's own Poisson coin. What the records of the training set add there is known to the
    adversary, their coins too, and is subtracted: the pair of worlds that the accountant compares.

    sums float64 (T, m): noisy sums (not means) of each step, less the records' part; clips (T,): C
    of each step, in which it is measured; std: of one entry's noise; rate: q of the Poisson coins.
    """

    sums: Array
    clips: Array
    std: float
    rate: float


@dataclass(frozen=True)
class Observed:
    """What the adversary of a world sees; None where the plan has no such thing.

    moments: blocks of all moment releases, in order. gradients: of a world of Dirac gradients.
    model: the trained (else the distilled) velocity model, in eval mode, and `low`, the time from
    which private steps trained it. samples: what the plan would release, drawn from it.
    """

    moments: tuple[Statistic, ...] | None = None
    gradients: WhiteBox | None = None
    model: nn.Module | None = None
    low: float = 0.0
    samples: Pair | None = None


@dataclass(frozen=True)
class Reference:
    """A model of another world: the same records and canaries, other coins `included` (m,)."""

    included: Mask
    model: nn.Module
    low: float = 0.0


@dataclass(frozen=True)
class World:
    """One training under a plan with canaries planted, as an attack is shown it.

    name: unique in the audit. control: the fault planted, None for the plan as it is. kind:
    "records" (canaries are images, all the way) or "gradients" (images in the moments, Dirac
    gradients in the private steps). plan: as audited, at its `epsilon` and `delta`, which the
    accountant promises of `slots`. radius: the clip radius R of codes. references: for likelihood
    ratios.
    """

    name: str
    control: Control | None
    kind: Kind
    plan: Plan
    epsilon: float
    delta: float
    radius: float
    canaries: Canaries
    observed: Observed
    references: tuple[Reference, ...] = field(default=())
    slots: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Coded:
    """Records with their codes as private training takes them (n, d) float64, labels (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    codes: Array


@dataclass(frozen=True)
class OwnRun:
    """The run's own model and samples, beside its real training records and its held-out ones.

    For membership inference without canaries: curator-only. Either side is a random part of at
    most a few thousand records.
    """

    members: Coded
    others: Coded
    model: nn.Module | None = None
    low: float = 0.0
    samples: Pair | None = None


class Attack(Protocol):
    """Scores canaries by what a world shows; it reads everything of a world but `included`."""

    @property
    def name(self) -> str:
        """Short and unique, such as "moments" or "dirac-gradients"."""
        ...

    def applies(self, world: World) -> bool:
        """Whether the world shows what this attack needs."""
        ...

    def score(self, world: World) -> Array:
        """Float64 (m,): higher means more likely included. Deterministic for a world."""
        ...
