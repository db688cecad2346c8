"""What images are drawn for: the plan's classes, fillings of its template, or public captions."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import DataError
from dpsynth.planning.captions import CLASS, FreeCaptions, Template
from dpsynth.planning.schema import Plan
from dpsynth.public.captions import Drawn, drawn_captions, labelled_captions


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

    A free caption's class is its label where its file has one, else the class that it names.

    Raises:
        DataError: a free caption names none of the declared classes, or several; or its label is
            none of them.
        MissingError, PlanError: the file of captions cannot be used, see `labelled_captions`.
    """
    classes, form = plan.private.classes, plan.private.captions
    if isinstance(form, FreeCaptions) and plan.sampling.captions is not None:
        drawn = labelled_captions(plan, plan.sampling.captions)
        found = [_class_of(one, classes) for one in drawn]
        return Asked([one.text for one in drawn], np.array(found, np.int64))
    if isinstance(form, Template):
        place = form.names.index(CLASS)
        own = np.array([filling[place] for filling in form.fillings(classes)])
        return Asked(drawn_captions(plan), own)
    return Asked(drawn_captions(plan), np.arange(len(classes)))


def _class_of(drawn: Drawn, classes: list[str]) -> int:
    """The class of its label; else the one whose name stands in the caption as whole words."""
    if drawn.label in classes:
        return classes.index(drawn.label)
    if drawn.label:
        raise DataError(
            f"sampling.captions: {drawn.text[:100]!r} has the label {drawn.label[:60]!r}, which is "
            "no declared class",
            hint="write names of private.classes in the column `label`, or leave the column out",
        )
    named = [
        place
        for place, name in enumerate(classes)
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", drawn.text, re.IGNORECASE)
    ]
    if len(named) != 1:
        raise DataError(
            f"sampling.captions: {drawn.text!r} names {len(named)} of the declared classes",
            hint="write captions that name one class each, or a CSV file with columns text and "
            "label: samples are labelled by it",
        )
    return named[0]
