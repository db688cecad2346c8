"""What images are drawn for: the plan's classes, fillings of its template, or public captions."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import DataError
from dpsynth.planning.captions import CLASS, FreeCaptions, Template
from dpsynth.planning.schema import Plan
from dpsynth.public.captions import drawn_captions


@dataclass(frozen=True, eq=False)
class Asked:
    """A caption for each condition y, and the class (Y,) that an image of it is labelled with."""

    captions: list[str]
    classes: NDArray[np.int64]

    @property
    def count(self) -> int:
        """How many conditions there are; also the null label."""
        return len(self.captions)


def asked_of(plan: Plan) -> Asked:
    """The conditions of a plan's samples, in the order of their labels.

    Raises:
        DataError: a free caption names none of the declared classes, or several.
        MissingError, PlanError: the file of captions cannot be used, see `drawn_captions`.
    """
    captions, classes, form = drawn_captions(plan), plan.private.classes, plan.private.captions
    if isinstance(form, Template):
        place = form.names.index(CLASS)
        return Asked(captions, np.array([filling[place] for filling in form.fillings(classes)]))
    if isinstance(form, FreeCaptions):
        return Asked(captions, np.array([_class_of(caption, classes) for caption in captions]))
    return Asked(captions, np.arange(len(classes)))


def _class_of(caption: str, classes: list[str]) -> int:
    """The one class whose name stands in the caption as whole words."""
    named = [
        place
        for place, name in enumerate(classes)
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", caption, re.IGNORECASE)
    ]
    if len(named) != 1:
        raise DataError(
            f"sampling.captions: {caption!r} names {len(named)} of the declared classes",
            hint="write captions that name one class each: samples are labelled by it",
        )
    return named[0]
