"""What a plan's own samples are made of: drawn ones, or coarse ones that were completed."""

from typing import Any

from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.completion import own_completion
from dpsynth.released.sampling import drawn_origin


def own_origin(verified: VerifiedPlan, count: int) -> dict[str, Any]:
    """Origin of so many samples of the plan's own, were they made of the files that are there now.

    Raises MissingError or DataError: what they are made of is not there, or not whole.
    """
    if not verified.plan.is_completed:
        return drawn_origin(verified, count)
    origin, coarse = own_completion(verified, count)
    # As it would be drawn now, not as the coarse folder's summary says.
    return {**origin, "coarse": drawn_origin(verified, coarse)}
