"""How a record's caption is read: what counts as text, and which condition it names.

A template's captions are compared by their words, so that capitals and spaces do not decide. No
caption names two conditions: a plan whose fillings read alike is refused (`caption_fits`).
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpsynth.planning.captions import FreeCaptions, Template, words_of

MOST_CAPTION = 1_000
"""Characters of a caption at most; a longer one is no caption."""

NO_CAPTION = f"no caption (text of 1 to {MOST_CAPTION} characters)"


def caption_text(value: object) -> str:
    r"""A caption as it is kept: one line of text with single spaces; empty where it is none.

    >>> caption_text("  a big\n dog "), caption_text(7), caption_text("\ud800")
    ('a big dog', '', '')
    """
    if not isinstance(value, str) or len(value) > MOST_CAPTION:
        return ""
    kinds = [unicodedata.category(character) for character in value]
    if "Cs" in kinds:  # half of a character: no UTF-8 can hold it
        return ""
    pairs = zip(value, kinds, strict=True)
    return " ".join("".join(" " if kind == "Cc" else x for x, kind in pairs).split())


@dataclass(frozen=True)
class CaptionRule:
    """How the captions of a source are read.

    `known`: a template's conditions by the words of their captions; None where captions are free.
    `owners`: the class of each condition. `lenient`: public data, where a caption may be missing.
    `single`: the one declared class, which a free caption without a label has.
    """

    known: Mapping[str, int] | None = None
    owners: tuple[int, ...] = ()
    lenient: bool = False
    single: bool = False

    @property
    def is_template(self) -> bool:
        """Whether each caption names a condition."""
        return self.known is not None

    def condition(self, text: str) -> int | None:
        """The condition that a caption names; None where it names none, or captions are free."""
        return None if self.known is None else self.known.get(words_of(text))

    def judged(self, text: str, label: int | None) -> tuple[int, str]:
        """A private record's class, and why it is no record (empty where it is one).

        Args:
            text: as `caption_text` gives it.
            label: index of the class that the source gives it; None where it gives none.
        """
        if not text:
            return 0, NO_CAPTION
        if self.known is None:
            found = 0 if label is None and self.single else label
            return (0, "no label beside a free caption") if found is None else (found, "")
        condition = self.condition(text)
        if condition is None:
            return 0, "a caption that is no filling of the template"
        owner = self.owners[condition]
        if label is not None and label != owner:
            return 0, "a caption whose class is not the record's label"
        return owner, ""


PUBLIC = CaptionRule(lenient=True)
"""Captions of public images: kept where a source has them, and never taken for a label."""


def caption_rule(
    captions: Template | FreeCaptions | None, classes: Sequence[str]
) -> CaptionRule | None:
    """How a plan's private captions are read; None for a plan without them.

    >>> rule = caption_rule(Template(kind="template", template="a {class}"), ["cat", "dog"])
    >>> rule.condition("A  dog"), rule.judged("a dog", 0)[1]
    (1, "a caption whose class is not the record's label")
    """
    match captions:
        case None:
            return None
        case Template():
            texts = captions.captions(list(classes))
            known = {words_of(text): number for number, text in enumerate(texts)}
            return CaptionRule(known, tuple(captions.owners(list(classes))))
        case FreeCaptions():
            return CaptionRule(single=len(classes) == 1)


def condition_captions(
    captions: Template | FreeCaptions | None, classes: Sequence[str]
) -> list[str]:
    """The public caption of each condition: of a template's fillings, else the class names.

    Free captions have no conditions: their classes' names are what is publicly known of them.
    """
    return captions.captions(list(classes)) if isinstance(captions, Template) else list(classes)
