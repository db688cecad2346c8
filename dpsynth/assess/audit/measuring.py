"""What attacks on one world amount to: lower bounds on epsilon, ROC figures, exposure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.accounting import one_run, tradeoff
from dpsynth.artifacts.lock import Lock
from dpsynth.assess.audit import gradients, moments, roc
from dpsynth.assess.audit.attacks import Membership, applicable, copies_in
from dpsynth.assess.audit.detector import Noise
from dpsynth.assess.audit.exposure import exposure
from dpsynth.assess.audit.picture import Curve
from dpsynth.assess.audit.verdict import Seen
from dpsynth.assess.audit.worlds import Array, Mask, World

CONFIDENCE = 0.95
"""Of all bounds of one world together, by Bonferroni over its attacks."""
FPRS = (0.001, 0.01)
_JOINED = 3.0
"""Steps that a canary joins on average, below which one in twenty or more joins none."""


@dataclass(frozen=True)
class Attacked:
    """One attack on one world: what it saw, a row of the report, and its curve."""

    seen: Seen
    row: dict[str, Any]
    curve: Curve


def attack_world(world: World) -> list[Attacked]:
    """Every attack that applies to a world; bounds at 95% confidence for all of them together."""
    attacks = applicable(world)
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(attacks))
    return [_attacked(world, attack.name, attack.score(world), confidence) for attack in attacks]


def _attacked(world: World, name: str, scores: Array, confidence: float) -> Attacked:
    included = world.canaries.included
    found = one_run.best_over_guesses(
        scores, included, world.delta, confidence, sides=_sides(world, name)
    )
    noise = _noise(world, name)
    seen = Seen(
        world=world.name,
        control=world.control,
        attack=name,
        promised=world.epsilon,
        delta=world.delta,
        bound=found.epsilon,
        confidence=CONFIDENCE,
        auc=roc.auc(scores, included),
        auc_interval=roc.auc_interval(scores, included),
        copies=copies_in(world) if name == "nearest-sample" else None,
        noise=noise,
    )
    row = {
        "world": world.name,
        "control": world.control,
        "attack": name,
        "promised": world.epsilon,
        "bound": found.epsilon,
        "correct": found.correct,
        "guesses": found.guesses,
        "canaries": found.canaries,
        "confidence": confidence,
        **roc_figures(scores, included),
    }
    if seen.copies is not None:
        row |= {"copies": seen.copies.included, "copies_by_chance": seen.copies.others}
    if noise is not None:
        known = math.isfinite(noise.deviation)  # else as many canaries as numbers: nothing is said
        row["noise_variance"] = noise.variance if known else None
        row["noise_deviation"] = noise.deviation if known else None
    return Attacked(seen, row, Curve(f"{world.name}: {name}", scores, included))


def _noise(world: World, attack: str) -> Noise | None:
    """The noise that a mechanism of the plan as it is really drew, beside what it promises."""
    if world.control is not None:
        return None
    if attack == "moments":
        return moments.seen_noise(world.observed.moments or ())
    if attack == "gradients" and world.observed.gradients is not None:
        return gradients.seen_noise(world.observed.gradients)
    return None


def _sides(world: World, attack: str) -> one_run.Sides:
    """Which coins are guessed: where few canaries join any step, absence is not to be told.

    Decided by declared numbers alone, before any coin is looked at.
    """
    seen = world.observed.gradients
    rare = seen is not None and seen.rate * len(seen.sums) < _JOINED
    return "included" if rare and attack.startswith("gradient") else "both"


def roc_figures(scores: Array, member: Mask) -> dict[str, Any]:
    """AUC, and the TPR at low FPRs, each with its 95% interval, as JSON values.

    `tpr_at_..._resolved` is False where there are too few others for such an FPR to show.
    """
    row: dict[str, Any] = {
        "auc": roc.auc(scores, member),
        "auc_interval": list(roc.auc_interval(scores, member, CONFIDENCE)),
    }
    for fpr in FPRS:
        point, name = roc.tpr_at_fpr(scores, member, fpr, CONFIDENCE), f"tpr_at_{fpr:g}"
        row[name] = point.tpr
        row[f"{name}_interval"] = list(point.tpr_interval)
        row[f"{name}_resolved"] = point.resolved
    return row


def exposures(world: World, attacked: Sequence[Attacked]) -> list[dict[str, Any]]:
    """Exposure of the included canaries among those that were not, by each attack's scores."""
    included = world.canaries.included
    return [
        {
            "world": world.name,
            "attack": one.seen.attack,
            **exposure(one.curve.scores[included], one.curve.scores[~included]).to_json(),
        }
        for one in attacked
    ]


def membership_row(found: Membership) -> dict[str, Any]:
    """A row of the report on the run's own model or samples."""
    return {
        "attack": found.attack,
        "members": int(found.member.sum()),
        "others": int((~found.member).sum()),
        **roc_figures(found.scores, found.member),
    }


def promised(lock: Lock) -> tuple[dict[str, Any], tuple[Array, Array]]:
    """What the accountant's trade-off curve allows any attack: figures, and its points to draw."""
    curve = tradeoff.curve([slot.event() for slot in lock.slots], lock.delta_slack)
    rates: NDArray[np.float64] = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 200)])
    most = np.maximum(tradeoff.tprs(curve, rates), tradeoff.tprs(curve, rates, "absent"))
    figures = {f"tpr_at_{one.fpr:g}": one.tpr for one in tradeoff.odds(curve, FPRS)}
    return {"advantage": tradeoff.advantage(curve), **figures}, (rates, most)
