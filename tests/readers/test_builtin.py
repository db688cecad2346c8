"""Digits and letters: what they are, and that letters are the same each time."""

import numpy as np
import pytest

from dpsynth.planning.schema import DigitsSource, ImageShape, LettersSource
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source
from dpsynth.readers.letters import FACES, LETTERS, _glyph, render

DIGITS = [str(number) for number in range(10)]
TINY = ImageShape(height=8, width=8)


def test_digits_are_scikit_learns_on_the_whole_byte_range():
    from sklearn.datasets import load_digits

    records = list(open_source(DigitsSource(kind="digits"), DIGITS, TINY))
    values, labels = load_digits(return_X_y=True)
    images = np.stack([record.image for record in records])
    assert images.shape == (1797, 8, 8, 1)
    assert images.min() == 0 and images.max() == 255
    np.testing.assert_array_equal(np.rint(images.reshape(-1, 64) / 255 * 16), values)
    assert [record.label for record in records] == labels.tolist()


def test_digits_of_another_declared_shape_or_class():
    with pytest.raises(UnreadableSourceError):
        list(open_source(DigitsSource(kind="digits"), DIGITS, ImageShape(height=28, width=28)))
    items = list(open_source(DigitsSource(kind="digits"), DIGITS[:9], TINY))
    assert sum(isinstance(item, BadRecord) for item in items) == 180


@pytest.mark.parametrize(
    "shape",
    [TINY, ImageShape(height=28, width=28), ImageShape(height=20, width=12, channels=3)],
)
def test_letters_have_the_declared_shape_and_are_the_same_each_time(shape):
    source = LettersSource(kind="letters", count=40, seed=3)
    first, second = (list(open_source(source, None, shape)) for _ in range(2))
    assert len(first) == 40
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, Record)
        assert one.image.shape == (shape.height, shape.width, shape.channels)
        assert one.image.dtype == np.uint8
        assert one.image.max() > 60
        assert one.label == other.label
        np.testing.assert_array_equal(one.image, other.image)


def test_another_seed_gives_other_letters():
    first, second = (next(iter(render(1, seed, TINY)))[0] for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_no_letter_that_looks_like_a_digit_and_every_class_but_o():
    assert not set("oOlI") & set(LETTERS)
    labels = {label for _, label in render(2000, 0, TINY)}
    assert labels == set(range(26)) - {14}


def test_every_face_draws_every_letter():
    """A face without a letter draws the same box for each."""
    for face in FACES:
        drawn = {_glyph(face, letter).distance.tobytes() for letter in LETTERS}
        assert len(drawn) > len(LETTERS) * 0.9


def test_tiny_letters_have_the_ink_of_scanned_digits():
    images = np.stack([image for image, _ in render(500, 0, TINY)]) / 255
    digits = open_source(DigitsSource(kind="digits"), DIGITS, TINY)
    ink = np.mean([record.image.mean() / 255 for record in digits])
    assert abs(images.mean() - ink) < 0.06
