"""How many images each measure needs: below that it is refused, or its report says why to doubt it.

`refusal` and `doubt` answer in words for the report; `shortage` is whichever applies. The measures
themselves raise `UsageError` where `refusal` speaks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dpsynth.assess.density import K_DENSITY
from dpsynth.assess.kernel import SIZE
from dpsynth.assess.metrics import NEIGHBOURS
from dpsynth.errors import UsageError

FRECHET_TIMES = 10
"""A Frechet distance is doubted below this many images a feature.

Two samples of n from one Gaussian with equal variances are at an expected distance of about
d / (2n) of the total variance: a twentieth at ten images a feature.
"""
NEIGHBOURS_DOUBT = 1000
ACCURACY_DOUBT = 400
"""Below this an exact 95% interval of a share may be wider than 0.1."""
PAIRS_DOUBT = 100
CLASS_DOUBT = 30
KERNEL_DOUBT = 100


@dataclass(frozen=True)
class Rule:
    """Counts for one measure; both are functions of the feature width d.

    Attributes:
        name: the measure in words.
        least: fewest images on each side for a value.
        enough: from here on nothing is said.
        why: what is wrong below `enough`.
    """

    name: str
    least: Callable[[int], int]
    enough: Callable[[int], int]
    why: str


def _fixed(count: int) -> Callable[[int], int]:
    return lambda _: count


_SIZED = "its value depends on the counts: compare it only with values at the same counts"
_BIASED = "it is biased upwards at such counts: compare it only with distances at the same counts"
_WIDE = "read it with its interval, which is wide"

RULES = {
    "frechet": Rule(
        "Frechet distance",
        lambda d: d + 1,
        lambda d: FRECHET_TIMES * d,
        f"{_BIASED}, or read the value without bias",
    ),
    "precision": Rule("precision", _fixed(NEIGHBOURS + 1), _fixed(NEIGHBOURS_DOUBT), _SIZED),
    "recall": Rule("recall", _fixed(NEIGHBOURS + 1), _fixed(NEIGHBOURS_DOUBT), _SIZED),
    "density": Rule("density", _fixed(K_DENSITY + 1), _fixed(NEIGHBOURS_DOUBT), _WIDE),
    "coverage": Rule("coverage", _fixed(K_DENSITY + 1), _fixed(NEIGHBOURS_DOUBT), _SIZED),
    "kernel": Rule("kernel distance", _fixed(2), _fixed(KERNEL_DOUBT), _WIDE),
    "accuracy": Rule("accuracy", _fixed(1), _fixed(ACCURACY_DOUBT), _WIDE),
    "consistency": Rule("label consistency", _fixed(1), _fixed(ACCURACY_DOUBT), _WIDE),
    "domain": Rule("domain rate", _fixed(1), _fixed(ACCURACY_DOUBT), _WIDE),
    "lpips": Rule("LPIPS", _fixed(1), _fixed(PAIRS_DOUBT), _WIDE),
    "diversity": Rule("diversity within a class", _fixed(2), _fixed(CLASS_DOUBT), _WIDE),
}
"""By measure: frechet (also of one class), precision, recall, density, coverage, kernel, accuracy,
consistency, domain, lpips (counts are pairs), diversity (counts are images of one class)."""


def refusal(measure: str, n: int, m: int, width: int) -> str | None:
    """Why `measure` has no value with n synthetic and m real images in `width` features, or None.

    A measure of one side alone takes n = m.

    Raises:
        UsageError: no such measure.

    >>> refusal("frechet", 2000, 10_000, 2048)
    'no Frechet distance: it needs at least 2,049 images on each side, one side has 2,000'
    """
    rule, count = _rule(measure), min(n, m)
    if count >= rule.least(width):
        return None
    return (
        f"no {rule.name}: it needs at least {rule.least(width):,} images on each side, "
        f"one side has {count:,}"
    )


def doubt(measure: str, n: int, m: int, width: int) -> str | None:
    """Why a value of `measure` at these counts is of little worth, or None.

    Raises:
        UsageError: no such measure.

    >>> doubt("accuracy", 50, 50, 0)
    'accuracy from 50 images (400 are enough): read it with its interval, which is wide'
    """
    rule, count = _rule(measure), min(n, m)
    if count >= rule.enough(width):
        return None
    return f"{rule.name} from {count:,} images ({rule.enough(width):,} are enough): {rule.why}"


def shortage(measure: str, n: int, m: int, width: int) -> str | None:
    """What the report says about a measure at these counts: `refusal`, else `doubt`, else None.

    Of a kernel distance also that its subsets are smaller than usual.

    Raises:
        UsageError: no such measure.
    """
    said = refusal(measure, n, m, width) or doubt(measure, n, m, width)
    if said is None and measure == "kernel" and min(n, m) < SIZE:
        return f"kernel distance over subsets of {min(n, m):,} images instead of {SIZE:,}"
    return said


def _rule(measure: str) -> Rule:
    if measure not in RULES:
        raise UsageError(f"no measure {measure!r}, there are {', '.join(sorted(RULES))}")
    return RULES[measure]
