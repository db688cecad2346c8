"""What images are drawn for: the plan's classes, fillings of its template, or public captions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.captions import CLASS, FreeCaptions, Template
from dpsynth.planning.schema import Plan
from dpsynth.public.captions import class_of, drawn_captions, labelled_captions


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
        found = [class_of(one, classes) for one in drawn]
        return Asked([one.text for one in drawn], np.array(found, np.int64))
    if isinstance(form, Template):
        place = form.names.index(CLASS)
        own = np.array([filling[place] for filling in form.fillings(classes)])
        return Asked(drawn_captions(plan), own)
    return Asked(drawn_captions(plan), np.arange(len(classes)))
