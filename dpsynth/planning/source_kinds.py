"""Where images come from: the kinds of sources that a plan may name."""

from typing import Annotated, Literal

from pydantic import Field

from dpsynth.planning.section import PathField, PositiveInt, Section, later


class IdxSource(Section):
    """An IDX pair (MNIST's format), gzipped or not."""

    kind: Literal["idx"]
    images: PathField
    labels: PathField


class FolderSource(Section):
    """An image folder or zip with `metadata.csv`/`metadata.jsonl`, or one subfolder a class."""

    kind: Literal["folder"]
    path: PathField


class NpzSource(Section):
    """A NumPy archive of `images` (n, H, W) or (n, H, W, C) and integer `labels` (n,).

    `captions`: name of an array (n,) of text, for plans with captions.
    """

    kind: Literal["npz"]
    path: PathField
    images: str = "images"
    labels: str = "labels"
    captions: str | None = later(None)


class DigitsSource(Section):
    """scikit-learn's 1,797 handwritten 8x8 digits."""

    kind: Literal["digits"]


class LettersSource(Section):
    """Letters rendered from the fonts that ship with matplotlib, under random affine jitter."""

    kind: Literal["letters"]
    count: PositiveInt = 20_000
    seed: int = 0


class GlyphsSource(Section):
    """The same letters under affine, elastic and thickness jitter, for learning to draw strokes.

    `digit_like: true` adds the letters that look like digits (such as O, l, S, Z).
    """

    kind: Literal["glyphs"]
    count: PositiveInt = 60_000
    seed: int = 0
    digit_like: bool = False


class PriorSource(Section):
    """Images that the plan's frozen prior draws by itself, for its conditions in turn.

    They are public: nothing private has a part in them, and they are drawn once (`public_seed`).
    """

    kind: Literal["prior"]
    count: PositiveInt = 256


Source = Annotated[
    IdxSource | FolderSource | NpzSource | DigitsSource | LettersSource | GlyphsSource,
    Field(discriminator="kind"),
]
"""Where records may lie."""
PublicSource = Annotated[
    IdxSource
    | FolderSource
    | NpzSource
    | DigitsSource
    | LettersSource
    | GlyphsSource
    | PriorSource,
    Field(discriminator="kind"),
]
"""Where public images come from."""
