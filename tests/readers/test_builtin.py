"""Digits, letters and glyphs: what they are, and that letters are the same each time."""

import hashlib
import string
from dataclasses import replace

import numpy as np
import pytest

from dpsynth.planning.schema import ImageShape
from dpsynth.planning.source_kinds import DigitsSource, GlyphsSource, LettersSource
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source
from dpsynth.readers.letters import (
    DIGIT_LIKE,
    FACES,
    LETTERS,
    Jitter,
    _draw,
    _glyph,
    _spline,
    glyphs,
    render,
)

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


@pytest.mark.parametrize(
    ("side", "sha256"),
    [
        (28, "6957a314fcd7593c4cfcd33c07e3e8abfef60f129b73113b4213ac96d9670a3f"),
        (8, "b34c89161dc1ceb762e260dcfe6e59f26739e350f37332b1dcf672bb043ac7f4"),
    ],
)
def test_letters_are_what_they_were_before_there_were_glyphs(side, sha256):
    """Plans name letters by count and seed: under pinned versions the bytes never change."""
    digest = hashlib.sha256()
    for image, label in render(300, 7, ImageShape(height=side, width=side)):
        digest.update(image.tobytes() + bytes([label]))
    assert digest.hexdigest() == sha256


@pytest.mark.parametrize(
    "shape",
    [TINY, ImageShape(height=28, width=28), ImageShape(height=20, width=12, channels=3)],
)
def test_glyphs_have_the_declared_shape_and_are_the_same_each_time(shape):
    source = GlyphsSource(kind="glyphs", count=40, seed=3)
    first, second = (list(open_source(source, None, shape)) for _ in range(2))
    assert len(first) == 40
    for one, other in zip(first, second, strict=True):
        assert one.image.shape == (shape.height, shape.width, shape.channels)
        assert one.image.dtype == np.uint8 and one.image.max() > 60
        np.testing.assert_array_equal(one.image, other.image)
    letters = open_source(LettersSource(kind="letters", count=40, seed=3), None, shape)
    assert any(not np.array_equal(x.image, y.image) for x, y in zip(first, letters, strict=True))


@pytest.mark.parametrize("digit_like", [False, True])
def test_glyphs_are_letters_alone_and_look_like_digits_only_if_asked(digit_like):
    letters = set(glyphs(digit_like).letters)
    assert letters == set(string.ascii_letters) - (set() if digit_like else set(DIGIT_LIKE))
    assert set("OoQDIlZzSsBbGgq") <= set(DIGIT_LIKE)
    source = GlyphsSource(kind="glyphs", count=2000, digit_like=digit_like)
    labels = {record.label for record in open_source(source, None, TINY)}
    assert labels == {string.ascii_lowercase.index(letter.lower()) for letter in letters}


STILL = Jitter((0.8, 0.8), 0.9, (1.0, 1.0), rotation=0, shear=0, shift=0, wobble=0)


@pytest.mark.parametrize("shape", [TINY, ImageShape(height=28, width=28)])
def test_elastic_jitter_bends_and_keeps_the_ink_and_thickness_changes_it(shape):
    def drawn(jitter):
        draw = np.random.default_rng(0)
        glyph = _glyph("DejaVuSans", "K")
        return np.stack([_draw(glyph, shape, jitter, draw) for _ in range(200)]) / 255

    still = replace(STILL, stroke=(0.15, 0.15))
    first = drawn(still)
    assert (first == first[0]).all()
    bent = drawn(replace(still, elastic=glyphs(False).usual.elastic))
    assert bent.std(axis=0).mean() > 0.03
    assert abs(bent.mean() - first.mean()) < 0.02
    ink = [drawn(replace(still, stroke=(width, width))).mean() for width in (0.09, 0.15, 0.25)]
    assert ink[0] < ink[1] < ink[2]


def test_the_elastic_field_passes_through_its_knots_smoothly():
    weights = _spline(1000)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(weights[[0, 250, 500, 750, 999]], np.eye(5), atol=0.02)
    assert np.abs(np.diff(weights, n=2, axis=0)).max() < 1e-3


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
