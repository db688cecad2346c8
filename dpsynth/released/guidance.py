"""The sampling port: start where the released moments say the flow is at t0, then integrate.

StraightDP section 3.1, "Sampling-time guidance". Under the moment model the flow's marginal at t0
is that of x = t0 z + (1 - t0) xi with z from the released mixture: for one Gaussian a class

    x_{t0} ~ N(t0 mu_y, t0^2 Sigma + (1 - t0)^2 I),

and for cells the mixture of these. Any prior or model then goes from t0 to 1, its weights and its
null branch untouched. Post-processing: no private record is read.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.flow import VelocityField, euler, interpolate
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.planning.schema import Plan
from dpsynth.public.representation import load_representation
from dpsynth.public.sources import read_public
from dpsynth.released.gaussians import ReleasedMixture

Mean = Literal["released", "zero", "public", "random"]
MEANS: tuple[Mean, ...] = ("released", "zero", "public", "random")
"""The released means, and the controls of section 4.4 that stand in their place."""
OWN_KIND = "prior"  # of the public source that a frozen prior draws
_PRIOR_DRAWS, _LEAST_DRAWS = 4_096, 32


@dataclass(frozen=True)
class Guide:
    """How samples are guided: from t0 (None: the plan's own start), with which means."""

    start: float | None = None
    mean: Mean = "released"

    def at(self, run: RunDir, plan: Plan) -> float:
        """The start t0 in (0, 1).

        Raises:
            UsageError: it lies outside.
            MissingError: the plan leaves it to a calibration that has none.
        """
        t0 = plan_start(run, plan) if self.start is None else self.start
        if not 0.0 < t0 < 1.0:
            raise UsageError(
                f"guidance from t0 = {t0:g} was asked for, expected 0 < t0 < 1", hint="--start 0.2"
            )
        return t0


def plan_start(run: RunDir, plan: Plan) -> float:
    """The plan's t0: a declared number, or the plateau edge of the public calibration.

    Raises:
        MissingError: the calibration has none.
    """
    if plan.sampling.start != "plateau":
        return plan.sampling.start
    start = read_json(run.calibration).get("start")
    if start is None:
        asked = plan.sampling.method == "guide"
        raise MissingError(
            "the calibration holds no start of guidance"
            + ("" if asked else ": the plan's sampling.method is not guide"),
            hint=typed("dpsynth", "pretrain", run.root) if asked else "name one: --start 0.2",
        )
    return float(start["t0"])


class TiltedStart:
    """Draws of the tilted marginal at t0, with the mixture's means or others in their place."""

    def __init__(self, mixture: ReleasedMixture, t0: float, means: Tensor | None = None) -> None:
        """Take the mixture, t0, and other class means (Y, d), or None for the mixture's own.

        Of a class with cells the whole is moved: its covariance stays.
        """
        self._mixture, self._t0 = mixture, t0
        self._moved = None if means is None else means - mixture.class_means

    def __call__(self, labels: Tensor, source: torch.Generator) -> Tensor:
        """One point x_{t0} (B, d) for each label (B,)."""
        codes = self._mixture.draw(labels, source)
        if self._moved is not None:
            codes = codes + self._moved[labels]
        noise = torch.randn(codes.shape, generator=source)
        return interpolate(codes, noise, torch.full(labels.shape, self._t0))


def control_means(
    mean: Mean, mixture: ReleasedMixture, prior: VelocityField, plan: Plan
) -> Tensor | None:
    """Class means (Y, d) of a control of section 4.4; None for the released ones.

    `zero`: the public mean, which is the origin of the code space. `random`: a direction of
    chance for each class, as long as its released mean. `public`: the mean of what the public
    prior draws for that label. The same each time it is called.
    """
    if mean == "released":
        return None
    if mean == "zero":
        return torch.zeros_like(mixture.class_means)
    source = generator(plan.public_seed + 7)
    if mean == "public":
        return _prior_means(prior, mixture.classes, mixture.dim, plan, source)
    directions = torch.randn(mixture.class_means.shape, generator=source)
    lengths = mixture.class_means.norm(dim=1, keepdim=True)
    drawn: Tensor = directions / directions.norm(dim=1, keepdim=True) * lengths
    return drawn


@one_thread()
def _prior_means(
    prior: VelocityField, classes: int, dim: int, plan: Plan, source: torch.Generator
) -> Tensor:
    each = max(_LEAST_DRAWS, _PRIOR_DRAWS // classes)
    means = []
    for label in range(classes):
        labels, start = torch.full((each,), label), torch.randn(each, dim, generator=source)
        settings = plan.sampling
        ended = euler(
            prior, start, labels, null=classes, steps=settings.steps, guidance=settings.guidance
        )
        means.append(ended.mean(0))
    return torch.stack(means)


def own_means(run: RunDir, plan: Plan) -> Tensor:
    """Class means (Y, d) of what a frozen prior draws: of its own samples, which pretrain drew.

    A condition without one has the mean of all.

    Raises MissingError: they are not there.
    """
    space, conditions = load_representation(run, plan), plan.private.conditions
    public = read_public(plan, run)
    drawn = np.flatnonzero([public.sources[n].kind == OWN_KIND for n in public.source])
    if not len(drawn):
        raise MissingError(
            "--mean public needs own samples of the prior",
            hint="add `{kind: prior, count: 256}` to public in the plan, and plan a new run",
        )
    sums, counts = torch.zeros(conditions, space.dim), torch.zeros(conditions)
    for place, image in enumerate(drawn.tolist()):
        y = place % conditions  # as pretrain drew them: the conditions in turn
        sums[y] += space.encode(public.images[image : image + 1])[0]
        counts[y] += 1
    overall = sums.sum(0) / counts.sum()
    known = counts[:, None] > 0
    return torch.where(known, sums / counts.clamp_min(1.0)[:, None], overall.expand_as(sums))


def guide_facts(guide: Guide, t0: float, moments_hash: str) -> dict[str, Any]:
    """What the samples' origin says of the port: t0, whose moments, and a control's name."""
    facts: dict[str, Any] = {"port": "guide", "start": t0, "moments_sha256": moments_hash}
    return facts if guide.mean == "released" else {**facts, "mean": guide.mean}
