"""What a run's calibration measures on public codes: clip radii, tau, the start of guidance.

Each is plotted beside `calibration.json`, into the public room.
"""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import progress
from dpsynth.models.field import AnalyticField
from dpsynth.models.velocity import load_for
from dpsynth.planning.release import Moments
from dpsynth.planning.schema import Plan
from dpsynth.public import calibrate
from dpsynth.public.profile import profile_facts, uses_profile
from dpsynth.public.projection import RADIUS_KEY, Projection
from dpsynth.public.start import start_facts, uses_plateau

TAU_PLOT, RADIUS_PLOT, START_PLOT = "tau.png", "radius.png", "start.png"


def measures(
    plan: Plan,
    room: Path,
    *,
    prior: Path,
    wide: Tensor,
    labels: Tensor,
    projection: Projection | None,
) -> dict[str, Any]:
    """Radii, tau and, where the plan asks, time buckets and guidance's start; plots go to `room`.

    Of a frozen prior the radii alone: there is no public training whose horizon tau would be.

    `prior`: the prior's file, whose sampling is rehearsed.
    `wide`: public codes (n, d), then those of their altered copies; `labels` (n,). Radii are read
    from both: private codes may be longer than plain public ones, and a radius below them
    distorts every record, where one too large only adds noise.
    """
    codes, quantile = wide[: len(labels)], plan.representation.clip_quantile
    if plan.frozen is not None:
        with progress("calibration: clip radius", 1):
            radii = _radii(wide, projection, quantile, room / RADIUS_PLOT)
        return {**radii, "clip_quantile": quantile}
    with progress("calibration: clip radius and tau", 1) as bar:
        curve, tau = _tau(plan, codes, labels, projection)
        calibrate.plot_tau(curve, tau, room / TAU_PLOT)
        facts = {
            **_radii(wide, projection, quantile, room / RADIUS_PLOT),
            "clip_quantile": quantile,
            "tau": tau,
            "tau_curve": curve.to_json(),
        }
        bar.advance()
    if uses_profile(plan):
        with progress("calibration: time buckets", 1) as bar:
            facts["profile"] = profile_facts(plan, codes, labels, tau, prior=prior, room=room)
            bar.advance()
    if uses_plateau(plan):
        with progress("calibration: start of guidance", 1) as bar:
            model, _ = load_for(prior, plan)
            path = room / START_PLOT
            facts["start"] = start_facts(plan, codes, labels, projection, prior=model, path=path)
            bar.advance()
    return facts


def tau_of(run: RunDir, plan: Plan) -> float:
    """The public cosine knee; 1 of a frozen prior, which has none and whose plan says any horizon.

    Raises MissingError: there is no calibration yet.
    """
    return 1.0 if plan.frozen is not None else float(read_json(run.calibration)["tau"])


def moments_of(plan: Plan) -> Moments:
    """What tau is measured for; without a moments stage, the paper's shared covariance."""
    return plan.stages.moments or Moments(covariance="shared")


def features_of(codes: Tensor, projection: Projection | None) -> Tensor:
    """What is released of codes (n, d): themselves, or their features (n, p)."""
    return codes if projection is None else projection.project(codes)


def _radii(
    wide: Tensor, projection: Projection | None, quantile: float, path: Path
) -> dict[str, float]:
    """R, and Rfeat where moments are released in a projection; both are drawn."""
    norms = {"codes": calibrate.code_norms(wide)}
    if projection is not None:
        norms["features"] = calibrate.code_norms(projection.project(wide))
    radii = {name: float(np.quantile(values, quantile)) for name, values in norms.items()}
    calibrate.plot_radius(norms, radii, path)
    released = {RADIUS_KEY: radii["features"]} if projection is not None else {}
    return {"radius": radii["codes"], **released}


def _tau(
    plan: Plan, codes: Tensor, labels: Tensor, projection: Projection | None
) -> tuple[calibrate.TauCurve, float]:
    settings = moments_of(plan)
    gaussians = calibrate.class_gaussians(
        features_of(codes, projection),
        labels,
        shared=settings.covariance != "class",
        rank=settings.rank,
        floor=settings.floor,
    )
    own = AnalyticField(*gaussians)
    field = own if projection is None else projection.lifted(own)
    curve = calibrate.tau_curve(codes, labels, field, seed=plan.public_seed + 2)
    return curve, calibrate.knee(np.array(curve.t), np.array(curve.weighted))
