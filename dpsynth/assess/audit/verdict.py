"""The verdict of an audit, in words: what was tried, what is promised, what was seen.

An audit fails in two ways. A bound above the promise: an attack that guessed better than a
mechanism of the plan's epsilon would let it, but with the stated small probability. A control that
was not seen: a fault was planted and no attack caught it, so that silence about the plan itself
would mean nothing. Both end a command with exit code 7. An AUC whose whole interval lies above what
the plan allows is a warning and fails nothing: such an interval takes the canaries' scores for
independent, which no proof says, where a bound assumes nothing (docs/privacy/audit.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.assess.audit.detector import Noise
from dpsynth.assess.audit.worlds import CONTROLS
from dpsynth.errors import UsageError

Array = NDArray[np.float64]
Interval = tuple[float, float]

NAMES = {
    "no-noise": "noise left out",
    "no-clip": "contributions not clipped",
    "noise-reused": "the same noise used twice",
    "copied-record": "a record copied into the output",
}
"""What is planted in each control."""


@dataclass(frozen=True)
class Copies:
    """Canaries that the output holds as they are: `included` ones, and `others` by chance."""

    included: int
    others: int


@dataclass(frozen=True)
class Seen:
    """What one attack saw of one world.

    world, control, attack: names, control None for the plan as it is. promised, delta: of that
    world's plan. bound: epsilon lower bound at `confidence`, each attack's for itself after the
    correction for their number. auc with its interval. copies: None where the attack looks for
    none. noise: seen over promised, None where the attack sees no noise by itself.
    """

    world: str
    control: str | None
    attack: str
    promised: float
    delta: float
    bound: float
    confidence: float
    auc: float
    auc_interval: Interval
    copies: Copies | None = None
    noise: Noise | None = None

    @property
    def caught(self) -> bool:
        """Whether this shows the fault of a control: a bound above the promise, or a copy."""
        copied = self.copies is not None and self.copies.included > self.copies.others
        return self.bound > self.promised or (self.control == "copied-record" and copied)

    @property
    def leaks(self) -> bool:
        """Whether this shows a fault of the plan as it is: a bound above it, or missing noise."""
        return self.bound > self.promised or (self.noise is not None and self.noise.short)

    @property
    def chance(self) -> bool:
        """Whether the AUC's interval holds 1/2."""
        return self.auc_interval[0] <= 0.5 <= self.auc_interval[1]

    def contradicts(self, allowed: "Allowed | None") -> bool:
        """Whether the AUC's whole interval lies above what the plan allows any attack."""
        return allowed is not None and self.auc_interval[0] > allowed.auc


@dataclass(frozen=True)
class Allowed:
    """What the plan's exact trade-off curve allows any attack: the largest TPR - FPR, and AUC.

    The AUC is by trapezoids below a concave curve: at the points that an audit takes, less than
    1e-4 below the exact one (measured for Gaussians of mu 0.1 to 4).
    """

    advantage: float
    auc: float

    @classmethod
    def under(cls, fpr: Array, tpr: Array) -> "Allowed":
        """From points of the curve (p,): FPR increasing from 0 to 1, and the largest TPR there."""
        area = np.diff(fpr) @ (tpr[1:] + tpr[:-1]) / 2
        return cls(float(np.max(tpr - fpr)), float(area))

    @property
    def auc_said(self) -> str:
        """The AUC in words, rounded up."""
        return f"{math.ceil(1000 * self.auc) / 1000:.3f}"


@dataclass(frozen=True)
class Verdict:
    """passed: the plan's own worlds keep its promise, and every control was seen.

    leaked: attacks that show they do not (`Seen.leaks`); controls_seen: each control and whether
    some attack caught every world of it; text: all of it in words; warned: attacks whose AUC
    contradicts the promise (`Seen.contradicts`), which fail nothing.
    """

    passed: bool
    leaked: tuple[Seen, ...]
    controls_seen: dict[str, bool]
    text: str
    warned: tuple[Seen, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """Controls that no attack saw."""
        return tuple(name for name, seen in self.controls_seen.items() if not seen)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {
            "passed": self.passed,
            "leaked": [[one.world, one.attack] for one in self.leaked],
            "warned": [[one.world, one.attack] for one in self.warned],
            "controls_seen": self.controls_seen,
            "text": self.text,
        }


def judge(
    results: Sequence[Seen],
    *,
    controls: Sequence[str] = CONTROLS,
    public: bool = False,
    canaries: int | None = None,
    allowed: Allowed | None = None,
) -> Verdict:
    """Pass or fail, against the plan and against the audit itself.

    Args:
        results: of every attack on every world.
        controls: those that must be among the worlds; one that is absent was not seen.
        public: whether public data stood in for the private records, so that the verdict may be
            published.
        canaries: how many were planted in a world.
        allowed: by the plan's exact trade-off curve; None says what epsilon and delta alone allow.

    Raises:
        UsageError: no attack on the plan as it is, or worlds of several promises.
    """
    honest = [one for one in results if one.control is None]
    if not honest:
        raise UsageError("an audit without an attack on the plan as it is has no verdict")
    if len({(one.promised, one.delta) for one in honest}) > 1:
        raise UsageError("the plan's own worlds have several promises")
    leaked = tuple(one for one in honest if one.leaks)
    warned = tuple(one for one in honest if one.contradicts(allowed))
    names = [*controls, *sorted({one.control for one in results if one.control} - {*controls})]
    seen = {name: _is_seen(name, results) for name in names}
    passed = not leaked and all(seen.values())
    parts = [
        _head(passed, leaked, seen, warned),
        _promise(honest[0], allowed),
        _tried(honest, canaries),
        _found(honest, leaked, allowed),
        _controls(results, seen),
        _reach(honest),
        _publish(public),
    ]
    text = "\n".join(part for part in parts if part)
    return Verdict(passed, leaked, seen, text, warned)


def _is_seen(control: str, results: Sequence[Seen]) -> bool:
    """Whether every world of the control was caught by some attack, and there is one."""
    worlds: dict[str, bool] = {}
    for one in results:
        if one.control == control:
            worlds[one.world] = worlds.get(one.world, False) or one.caught
    return bool(worlds) and all(worlds.values())


def _head(
    passed: bool, leaked: Sequence[Seen], seen: dict[str, bool], warned: Sequence[Seen]
) -> str:
    if passed and warned:
        return (
            "PASS, WITH A WARNING. No bound is above the promise, and every planted fault was "
            "seen; but an attack guessed better on average than the plan allows (below)."
        )
    if passed:
        return "PASS. No attack saw more than the plan promises, and every planted fault was seen."
    said = []
    if leaked:
        said.append("an attack saw more than the plan promises")
    if not all(seen.values()):
        said.append("the audit missed a fault that it had planted itself, so it shows nothing")
    return f"FAIL: {'; and '.join(said)}."


def _promise(one: Seen, allowed: Allowed | None) -> str:
    advantage = _advantage(one) if allowed is None else min(_advantage(one), allowed.advantage)
    said = (
        f"Promised: the accountant says epsilon {one.promised:.4g} at delta {one.delta:.2g} for "
        "all that is released. Whatever the attack, the share of members that it finds is then at "
        f"most {advantage:.2f} above the share of others that it accuses"
    )
    return said + ("." if allowed is None else f", and its AUC at most {allowed.auc_said}.")


def _advantage(one: Seen) -> float:
    """Largest TPR - FPR under (epsilon, delta): (e^eps - 1 + 2 delta) / (e^eps + 1).

    Where TPR <= e^eps FPR + delta meets its mirror image (Kairouz, Oh and Viswanath 2015).
    """
    rest = math.exp(-one.promised)  # does not overflow
    return min(1.0, (1.0 - rest + 2.0 * one.delta * rest) / (1.0 + rest))


def _tried(honest: Sequence[Seen], canaries: int | None) -> str:
    worlds, attacks = ({getattr(one, key) for one in honest} for key in ("world", "attack"))
    planted = "canaries" if canaries is None else f"{canaries} canaries"
    return (
        f"Tried: {', '.join(sorted(attacks))}; on {_count(len(worlds), 'training')} of the plan "
        f"with {planted} planted by fair coins, by an adversary who knows everything but these."
    )


def _found(honest: Sequence[Seen], leaked: Sequence[Seen], allowed: Allowed | None) -> str:
    best = max(honest, key=lambda one: (one.bound, one.auc))
    lines = [
        f"Seen: the largest lower bound is epsilon {best.bound:.4g} ({best.attack}), at "
        f"{best.confidence:.0%} confidence for all attacks on a training together."
    ]
    above = [one for one in honest if one.auc_interval[0] > 0.5]
    if not above:
        lines.append("No attack guessed better than chance (each AUC's interval holds 0.5).")
    lines += [_guessed(one, allowed, len(honest)) for one in above]
    lines += [_leak(one) for one in leaked]
    lines += [_copies(one) for one in honest if one.copies is not None and one.copies.included]
    return "\n".join(lines)


def _guessed(one: Seen, allowed: Allowed | None, tried: int) -> str:
    """What an AUC above chance means beside the promise."""
    low, high = one.auc_interval
    figures = f"(AUC {one.auc:.3f}, {low:.3f} to {high:.3f})"
    said = f"{one.attack} on {one.world} guessed better than chance {figures}, "
    if allowed is None or one.auc <= allowed.auc:
        return said + "as a finite epsilon allows."
    most = allowed.auc_said
    if not one.contradicts(allowed):
        return said + (
            f"above {most} as chance may carry so few canaries: its interval reaches down to "
            f"{low:.3f}."
        )
    return (
        f"WARNING, AGAINST THE PROMISE: {one.attack} on {one.world} {figures} has its whole 95% "
        f"interval above the {most} that the plan allows. Chance alone does so to one in forty of "
        f"the attacks that reach that limit ({_count(tried, 'attack was', 'attacks were')} tried), "
        "so that it fails no audit. Run again with more canaries; if it is there again, hand "
        "nothing out."
    )


def _leak(one: Seen) -> str:
    if one.bound > one.promised:
        return (
            f"ABOVE THE PROMISE: {one.attack} on {one.world} shows epsilon of at least "
            f"{one.bound:.4g}; {one.promised:.4g} is promised. Hand nothing out."
        )
    share = one.noise.variance if one.noise else 1.0
    return (
        f"TOO LITTLE NOISE: {one.attack} on {one.world} finds {share:.3g} of the promised noise "
        "variance. Hand nothing out."
    )


def _copies(one: Seen) -> str:
    found = one.copies or Copies(0, 0)
    return (
        f"{one.world}: {_count(found.included, 'planted canary', 'planted canaries')} in the "
        f"output as they are, beside {found.others} that were not planted. Look at the images."
    )


def _controls(results: Sequence[Seen], seen: dict[str, bool]) -> str:
    lines = ["Planted faults, each in a training of its own:"]
    for name, found in seen.items():
        mine = [one for one in results if one.control == name]
        lines.append(f"- {NAMES.get(name, name)}: {_control(mine, found)}")
    return "\n".join(lines) if seen else ""


def _control(mine: Sequence[Seen], found: bool) -> str:
    """Who saw the fault in each of its worlds, by the clearest attack."""
    if not mine:
        return "MISSED, no attack looked at it"
    worlds: dict[str, Seen] = {}
    for one in mine:
        best = worlds.get(one.world, one)
        clearer = (one.caught, one.bound) > (best.caught, best.bound)
        worlds[one.world] = one if clearer else best
    said = "; ".join(_world(one) for one in worlds.values())
    return said if found or len(worlds) == 1 else f"MISSED in part: {said}"


def _world(best: Seen) -> str:
    if not best.caught:
        return (
            f"MISSED, the largest bound is {best.bound:.4g} where {best.promised:.4g} is promised"
        )
    if best.bound <= best.promised and best.copies is not None:
        return f"seen by {best.attack}: {_count(best.copies.included, 'canary', 'canaries')} copied"
    return f"seen by {best.attack}: bound {best.bound:.4g} where {best.promised:.4g} is promised"


def _reach(honest: Sequence[Seen]) -> str:
    """What the absence of a finding does not say."""
    least = min(one.promised for one in honest)
    return (
        f"A bound below {least:.4g} proves no privacy: the guarantee rests on the accounting and "
        "on noise that was really drawn. An audit finds faults; it cannot show that there are "
        "none."
    )


def _publish(public: bool) -> str:
    if public:
        return (
            "Public data stood in for the private records: this verdict is about the plan and the "
            "code alone, and may be published."
        )
    return (
        "The private records were in these trainings: this verdict stays with the curator. One "
        "that may be published comes from dpsynth audit RUN --public-data."
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
