"""Independent checks on a composed epsilon: Renyi composition and the closed form.

The two bounds come from one library; a fault in it, or in how it is called, should show
here before a budget is trusted to it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from dpsynth.accounting import gaussian
from dpsynth.accounting.events import Event
from dpsynth.accounting.merging import Merged, merge
from dpsynth.errors import BudgetError

# Never close to 1, where a published accountant returned 0 for a mechanism with epsilon > 0.
ORDERS = (1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512)
_ROUNDING = 1e-9


@dataclass(frozen=True)
class EpsilonBounds:
    """The true epsilon lies between `optimistic` and `pessimistic`; `grid` is the loss step.

    Budgets are held to `pessimistic`. `grid` 0 means that no grid was needed.
    """

    pessimistic: float
    optimistic: float
    grid: float


def cross_check(events: Iterable[Event], delta: float, bounds: EpsilonBounds) -> dict[str, float]:
    """Compare `bounds` with values that come by other ways; returns those values.

    `rdp`: epsilon by Renyi composition (Mironov 2017), an upper bound. `gaussian`: closed
    form of the plain Gaussian mechanisms alone, a lower bound (exact if there is no other).

    Raises:
        BudgetError: a comparison fails; no epsilon from this accountant can be trusted then.
    """
    merged = merge(events)
    found = {"optimistic": bounds.optimistic, "pessimistic": bounds.pessimistic}
    if merged.unaccounted or (merged.gaussian is None and not merged.sampled):
        return found
    found["rdp"] = _rdp_epsilon(merged, delta)
    _require(bounds.optimistic, found["rdp"], "the optimistic PLD epsilon", "the RDP epsilon")
    _require(bounds.optimistic, bounds.pessimistic, "the optimistic bound", "the pessimistic one")
    if merged.gaussian is not None:
        found["gaussian"] = gaussian.epsilon(delta, merged.gaussian)
        exact = "the Gaussian closed form"
        _require(found["gaussian"], bounds.pessimistic, exact, "the pessimistic PLD epsilon")
        if not merged.sampled:
            _require(bounds.optimistic, found["gaussian"], "the optimistic PLD epsilon", exact)
    return found


def _rdp_epsilon(merged: Merged, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    # It logs each order that it has to leave out: a looser bound, and nothing for a custodian.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant(ORDERS)  # its default is add-or-remove-one
    if merged.gaussian is not None:
        accountant.compose(GaussianDpEvent(merged.gaussian))
    for group in merged.sampled:
        event = PoissonSampledDpEvent(group.rate, GaussianDpEvent(group.sigma))
        accountant.compose(event, group.steps)
    return float(accountant.get_epsilon(delta))


def _require(small: float, large: float, small_name: str, large_name: str) -> None:
    if not small <= large * (1 + _ROUNDING) + _ROUNDING:
        raise BudgetError(
            f"the accountant contradicts itself: {small_name} {small:.9g} is above {large_name} "
            f"{large:.9g}; no epsilon can be trusted",
            hint="report this with the plan; pip install 'dp-accounting>=0.6' if it is older",
        )
