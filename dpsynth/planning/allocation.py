"""Time-heterogeneous allocation: how DP-SGD's clip and noise may differ by time bucket."""

from typing import Annotated

from pydantic import Field

from dpsynth.planning.section import Section

SHAPES = (0.0, 0.25, 0.5, 0.75, 1.0)
Shape = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Allocation(Section):
    """The shape family of the planner (StraightDP, appendix B.5): one candidate for each beta.

    beta 0 is the uniform plan, which is always in the family.
    """

    shapes: Annotated[list[Shape], Field(min_length=1)] = Field(list(SHAPES))
