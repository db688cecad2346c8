"""What every part of a plan is made of: strict, frozen sections, and the types of their fields."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
# YAML gives text; everything else in the plan is strict, so that "1" is never taken for 1.
PathField = Annotated[Path, Field(strict=False)]

LATER = "later"
MISFIT = "misfit"


def later(default: Any, **rules: Any) -> Any:
    """A field that older plans do not have: while it holds its default, no hash sees it."""
    return Field(default, json_schema_extra={LATER: True}, **rules)


def misfit(reason: str, *at: str, hint: str = "") -> PydanticCustomError:
    """What to raise where fields that are sound by themselves do not fit together (a ValueError).

    `at`: dotted keys, seen from the section that raises it; the complaint shows the line of the
    first of them that the plan has. `hint`: what to type.
    """
    return PydanticCustomError(MISFIT, "{reason}", {"reason": reason, "at": at, "hint": hint})


class Section(BaseModel):
    """Base of all plan sections: frozen, strict types, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
