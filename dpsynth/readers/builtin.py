"""Images that come with installed packages: scikit-learn's digits, letters of matplotlib."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dpsynth.errors import MissingError
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import GlyphsSource, LettersSource
from dpsynth.readers.records import BadRecord, Image, Item, Record, check_label, check_shape

INSTALL_HINT = 'pip install -e ".[torch]"'


class _BuiltIn:
    """A source that comes with a library: no file of the custodian's is read."""

    def files(self) -> list[Path]:
        """None of the custodian's."""
        return []

    def ignored(self) -> list[str]:
        """Nothing."""
        return []


class DigitsReader(_BuiltIn):
    """scikit-learn's 1,797 handwritten digits, 8x8 grey; values 0..16 scaled to 0..255."""

    def __init__(self, classes: tuple[str, ...] | None, image: ImageShape | None) -> None:
        self._declared, self._image = classes, image

    def __iter__(self) -> Iterator[Item]:
        """Yield each digit; its class is its value.

        Raises:
            UnreadableSourceError: the plan declares another shape than 8x8x1.
            MissingError: scikit-learn is not installed.
        """
        check_shape("digits", (8, 8, 1), self._image)
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise MissingError("the digits source needs scikit-learn", hint=INSTALL_HINT) from error
        values, labels = load_digits(return_X_y=True)
        images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            reason = check_label(label, self._declared)
            yield BadRecord(f"digit {number}", reason) if reason else Record(image, label)


class LettersReader(_BuiltIn):
    """Rendered letters, drawn at the declared shape (28x28 grey without one)."""

    def __init__(
        self,
        source: LettersSource | GlyphsSource,
        classes: tuple[str, ...] | None,
        image: ImageShape | None,
    ) -> None:
        self._source, self._declared = source, classes
        self._image = image or ImageShape(height=28, width=28)

    def __iter__(self) -> Iterator[Item]:
        """Yield `count` letters; the class is the letter's place in the alphabet, case aside.

        Raises:
            MissingError: matplotlib or Pillow is not installed.
        """
        for number, (image, label) in enumerate(self._rendered()):
            reason = check_label(label, self._declared)
            yield BadRecord(f"letter {number}", reason) if reason else Record(image, label)

    def _rendered(self) -> Iterator[tuple[Image, int]]:
        from dpsynth.readers.letters import render

        return render(self._source.count, self._source.seed, self._image)


class GlyphsReader(LettersReader):
    """The same letters under stronger jitter: affine, elastic and of the strokes' thickness."""

    def __init__(
        self, source: GlyphsSource, classes: tuple[str, ...] | None, image: ImageShape | None
    ) -> None:
        super().__init__(source, classes, image)
        self._digit_like = source.digit_like

    def _rendered(self) -> Iterator[tuple[Image, int]]:
        from dpsynth.readers.letters import glyphs, render

        style = glyphs(self._digit_like)
        return render(self._source.count, self._source.seed, self._image, style)
