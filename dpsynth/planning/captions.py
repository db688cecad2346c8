"""Captions: how records are described, what of it a release sees, and what images are drawn for.

A caption plan conditions on `conditions`: all fillings of a template's slots, or, for captions
without a template, the captions themselves.
"""

import itertools
import math
import re
import unicodedata
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsynth.planning.section import (
    Fraction,
    PathField,
    PositiveFloat,
    PositiveInt,
    Section,
    later,
)

CLASS = "class"
MOST_CONDITIONS = 4096
MINILM = "minilm"
"""In place of an encoder's folder: the one of an installed package (docs/captions.md)."""
_SLOT = re.compile(r"\{([a-z][a-z0-9_]*)\}")

Values = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


def words_of(text: str) -> str:
    """A caption as it is compared: without capitals, outer and double spaces, invisible marks.

    >>> words_of(" A  Big Dog") == words_of("a big dog")
    True
    """
    plain = unicodedata.normalize("NFKC", text)
    seen = "".join(x for x in plain if unicodedata.category(x) != "Cf")
    return " ".join(seen.split()).casefold()


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

    @property  # not cached: what is cached on a section is taken for one of its fields
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

    def owners(self, classes: list[str]) -> list[int]:
        """The class of each condition, as its place in `classes`, in the order of `fillings`."""
        at = self.names.index(CLASS)
        return [filling[at] for filling in self.fillings(classes)]

    def condition(self, caption: str, classes: list[str]) -> int | None:
        """The condition whose caption has the words of `caption`; None where there is none.

        For many captions take `caption_rules.caption_rule`, which lists them once.

        >>> Template(kind="template", template="a {class}").condition("A  Dog ", ["cat", "dog"])
        1
        """
        wanted = words_of(caption)
        texts = (words_of(text) for text in self.captions(classes))
        return next((number for number, text in enumerate(texts) if text == wanted), None)

    def alike(self, classes: list[str]) -> tuple[str, str] | None:
        """Two conditions whose captions have the same words; None where there are no such two.

        >>> two = Template(kind="template", template="{size}{class}", slots={"size": ["a", "ab"]})
        >>> two.alike(["bc", "c"])
        ('abc', 'abc')
        """
        seen: dict[str, str] = {}
        for text in self.captions(classes):
            if (words := words_of(text)) in seen:
                return seen[words], text
            seen[words] = text
        return None

    def count(self, classes: list[str]) -> int:
        """How many conditions there are."""
        return math.prod(len(values) for values in self.values(classes))


class FreeCaptions(Section):
    """Captions of any form. Images are drawn for public captions: `sampling.captions`.

    `public` states, for whoever reads the card, that these captions are known anyway: the setting
    of DP-Wavelet. What is computed is the same.
    """

    kind: Literal["free"]
    public: bool = later(False)


Captions = Annotated[Template | FreeCaptions, Field(discriminator="kind")]


class CaptionBlocks(Section):
    """Shares of the squared joint sensitivity of Mcc, Mzc and the second moment."""

    caption: PositiveFloat = 0.1
    cross: PositiveFloat = 0.5
    second: PositiveFloat = 0.4


class CaptionRelease(Section):
    """Cross moments of codes and caption features in place of class moments (equation 5).

    `features`: one-hot conditions, one indicator block a slot, or the pooled embedding of a frozen
    public sentence encoder (`encoder`: the folder of a sentence-transformers model, or `minilm`
    for that of an installed package; `width`: numbers of its embedding). `ridge`: of the
    regression. `centre`: features are centred at their public mean. `intercept`: a constant
    feature is released jointly. `clip_quantile`, `margin`: the caption radius is `margin` times
    this quantile of public feature norms (one-hot and slots have a radius of their own).
    """

    features: Literal["one-hot", "slots", "sentence"]
    encoder: Literal["minilm"] | PathField | None = None
    width: PositiveInt = later(384)
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
                "encoder: `minilm` or the folder of a sentence-transformers model, given with "
                "`features: sentence` and with nothing else"
            )
        return self
