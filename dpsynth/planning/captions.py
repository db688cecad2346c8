"""Captions: how records are described, what of it a release sees, and what images are drawn for.

A caption plan conditions on `conditions`: all fillings of a template's slots, or, for captions
without a template, the captions themselves.
"""

import itertools
import math
import re
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsynth.planning.section import Fraction, PathField, PositiveFloat, Section

CLASS = "class"
MOST_CONDITIONS = 4096
_SLOT = re.compile(r"\{([a-z][a-z0-9_]*)\}")

Values = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class Template(Section):
    """Captions that all follow one public template, such as "a {stroke} {class}".

    `slots` lists the values of every slot but `class`, whose values are the plan's classes.
    """

    kind: Literal["template"]
    template: str
    slots: dict[str, Values] = Field({})

    @model_validator(mode="after")
    def _slots_fit(self) -> "Template":
        named = _SLOT.findall(self.template)
        if len(set(named)) != len(named) or CLASS not in named:
            raise ValueError("template names {class} once, and every other slot once")
        if set(named) != {CLASS, *self.slots} or CLASS in self.slots:
            raise ValueError(
                f"slots lists {sorted(self.slots)}, the template has {sorted(named)}: list every "
                "slot but class"
            )
        for slot, values in self.slots.items():
            if len(set(values)) != len(values):
                raise ValueError(f"values of slot {slot} must be distinct")
        return self

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The slots in the template's order."""
        return tuple(_SLOT.findall(self.template))

    def values(self, classes: list[str]) -> list[list[str]]:
        """The values of each slot, in the template's order."""
        return [classes if name == CLASS else self.slots[name] for name in self.names]

    def fillings(self, classes: list[str]) -> list[tuple[int, ...]]:
        """Each condition as the places of its values in their slots, the last slot fastest."""
        return list(itertools.product(*(range(len(v)) for v in self.values(classes))))

    def captions(self, classes: list[str]) -> list[str]:
        """The caption of each condition, in the order of `fillings`.

        >>> Template(kind="template", template="a {size} {class}",
        ...     slots={"size": ["big", "small"]}).captions(["cat"])
        ['a big cat', 'a small cat']
        """
        slots = self.values(classes)
        return [
            self._filled([slot[k] for slot, k in zip(slots, filling, strict=True)])
            for filling in self.fillings(classes)
        ]

    def _filled(self, values: list[str]) -> str:
        by_name = dict(zip(self.names, values, strict=True))
        return _SLOT.sub(lambda match: by_name[match[1]], self.template)

    def count(self, classes: list[str]) -> int:
        """How many conditions there are."""
        return math.prod(len(values) for values in self.values(classes))


class FreeCaptions(Section):
    """Captions of any form. Images are drawn for public captions: `sampling.captions`."""

    kind: Literal["free"]


Captions = Annotated[Template | FreeCaptions, Field(discriminator="kind")]


class CaptionBlocks(Section):
    """Shares of the squared joint sensitivity of Mcc, Mzc and the second moment."""

    caption: PositiveFloat = 0.1
    cross: PositiveFloat = 0.5
    second: PositiveFloat = 0.4


class CaptionRelease(Section):
    """Cross moments of codes and caption features in place of class moments (equation 5).

    `features`: one-hot conditions, one indicator block a slot, or the pooled embedding of a frozen
    public sentence encoder (`encoder`: the folder of a sentence-transformers model). `ridge`: of
    the regression. `centre`: features are centred at their public mean. `intercept`: a constant
    feature is released jointly. `clip_quantile`, `margin`: the caption radius is `margin` times
    this quantile of public feature norms (one-hot and slots have a radius of their own).
    """

    features: Literal["one-hot", "slots", "sentence"]
    encoder: PathField | None = None
    ridge: PositiveFloat = 1e-3
    centre: bool = True
    intercept: bool = True
    clip_quantile: Fraction = 0.99
    margin: PositiveFloat = 1.1
    blocks: CaptionBlocks = CaptionBlocks()

    @model_validator(mode="after")
    def _encoder_fits(self) -> "CaptionRelease":
        if (self.features == "sentence") is (self.encoder is None):
            raise ValueError(
                "encoder: the folder of a sentence-transformers model, given with "
                "`features: sentence` and with nothing else"
            )
        return self


def captions_fault(
    captions: Template | FreeCaptions | None,
    release: CaptionRelease | None,
    *,
    conditions: int,
    velocity: str,
    drawn_for: bool,
) -> str:
    """Why these parts of a plan do not fit together; empty where they do.

    `velocity`: its kind; `drawn_for`: whether the plan names captions to draw images for.
    """
    if conditions > MOST_CONDITIONS:
        return f"the template has {conditions} fillings, more than {MOST_CONDITIONS}"
    if release is not None and release.features == "slots" and not isinstance(captions, Template):
        return "features: slots needs private.captions of kind template"
    if isinstance(captions, FreeCaptions):
        if release is None or release.features != "sentence":
            return "captions of kind free need stages.moments.captions with features: sentence"
        if velocity != "mmdit" or not drawn_for:
            return "captions of kind free need velocity.kind: mmdit and sampling.captions"
    return ""
