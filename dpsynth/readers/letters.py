"""Letters drawn from the fonts that ship with matplotlib, under random jitter.

Public data: a fixed seed is meant, so that everyone gets the same images. Two sources draw from
here: `letters`, and `glyphs` with stronger jitter and fewer letters. Both leave out letters that
look like digits, so that no digit is taught by its shape.

Each glyph is kept as its signed distance to the outline, so that one lookup gives any stroke
width, antialiased, at any size.
"""

import math
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.errors import MissingError
from dpsynth.planning.schema import ImageShape
from dpsynth.readers.records import Image

# Text faces alone: the size, display and symbol fonts beside them hold no plain alphabet.
FACES = (
    "DejaVuSans",
    "DejaVuSans-Oblique",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "STIXGeneralBol",
    "cmb10",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)
LETTERS = "".join(letter for letter in string.ascii_letters if letter not in "oOlI")
# Letters that a slack hand, or the jitter, turns into a digit: O o Q D 0, I l 1, Z z 2, S s 5,
# B 8, b G 6, g q 9. Also i, j and J: but for dot and hook they are the stroke of a 1; by the
# correlation of blurred shapes only l, I and S are nearer to a digit of the same faces.
DIGIT_LIKE = "OoQDIlZzSsBbGgqiJj"
# Height in pixels of each glyph's master drawing, and the margin around it.
MASTER, MARGIN = 64, 16

Field = NDArray[np.float64]


@dataclass(frozen=True)
class Jitter:
    """Ranges of the jitter, uniform each. Lengths are shares of the image's or glyph's height."""

    size: tuple[float, float] = (0.6, 0.95)
    width: float = 0.9
    aspect: tuple[float, float] = (0.8, 1.3)
    rotation: float = 0.2
    shear: float = 0.3
    shift: float = 0.03
    wobble: float = 0.05
    elastic: float = 0.0
    stroke: tuple[float, float] = (0.1, 0.22)


USUAL = Jitter()
# Images too small for a margin are cropped to strokes that all but fill a pixel, as scanned
# digits of 8x8 are.
TINY = Jitter(size=(0.95, 1.12), width=0.8, stroke=(0.16, 0.3))
# Further than any font goes; the elastic field stands in the wave's place.
BENT = Jitter(aspect=(0.7, 1.4), rotation=0.25, shear=0.35, shift=0.04, wobble=0, elastic=0.035)


@dataclass(frozen=True)
class Style:
    """What a source draws: which letters, and their jitter on usual and on tiny images."""

    letters: str
    usual: Jitter
    tiny: Jitter


PLAIN = Style(LETTERS, USUAL, TINY)
# Knots of the elastic field along each axis, as in `models.deform`.
KNOTS = 5


def glyphs(digit_like: bool) -> Style:
    """The style of the glyphs source; `digit_like` keeps the letters that look like digits."""
    return Style(
        "".join(x for x in string.ascii_letters if digit_like or x not in DIGIT_LIKE),
        replace(BENT, stroke=(0.09, 0.25)),
        replace(BENT, size=TINY.size, width=TINY.width, stroke=(0.14, 0.32)),
    )


@dataclass(frozen=True, eq=False)
class Glyph:
    """Signed distance to the outline (inside positive), in master pixels; the box's own size."""

    distance: Field
    height: float
    width: float
    half_stroke: float


def render(
    count: int, seed: int, shape: ImageShape, style: Style = PLAIN
) -> Iterator[tuple[Image, int]]:
    """Draw `count` letters, white on black, uint8 (H, W, C), each with its class 0..25.

    The same arguments give the same images under the same matplotlib and Pillow.

    Raises:
        MissingError: matplotlib, Pillow or SciPy is not installed.
    """
    generator = np.random.default_rng(seed)
    jitter = style.tiny if shape.height < 16 else style.usual
    for _ in range(count):
        face = FACES[int(generator.integers(len(FACES)))]
        letter = style.letters[int(generator.integers(len(style.letters)))]
        grey = _draw(_glyph(face, letter), shape, jitter, generator)
        image = np.repeat(grey[:, :, None], shape.channels, axis=2)
        yield image, string.ascii_lowercase.index(letter.lower())


def _draw(
    glyph: Glyph, shape: ImageShape, jitter: Jitter, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """One glyph under one draw of the jitter: uint8 (H, W)."""
    from scipy.ndimage import map_coordinates

    fine = max(2, math.ceil(32 / shape.height))
    matrix, pixel = _affine(glyph, shape, jitter, generator)
    rows, columns = _centred_grid(shape.height, shape.width, fine)
    shift = generator.uniform(-jitter.shift, jitter.shift, 2) * shape.height
    points = matrix @ np.stack([rows + shift[0], columns + shift[1]])
    points += _wobble(points, jitter.wobble * MASTER, generator)
    if jitter.elastic:
        points += _elastic(shape, fine, jitter.elastic * shape.height * pixel, generator)
    centre = np.array(glyph.distance.shape)[:, None] / 2 - 0.5
    distance = map_coordinates(glyph.distance, points + centre, order=1, mode="nearest")
    target = generator.uniform(*jitter.stroke) * MASTER / 2
    thicker = max(target - glyph.half_stroke, -0.5 * glyph.half_stroke)
    # A ramp one fine pixel wide is the antialiasing of the fine grid.
    inside = np.clip(0.5 + (distance + thicker) * fine / pixel, 0, 1)
    blocks = inside.reshape(shape.height, fine, shape.width, fine)
    ink: NDArray[np.uint8] = np.rint(blocks.mean(axis=(1, 3)) * 255).astype(np.uint8)
    return ink


def _affine(
    glyph: Glyph, shape: ImageShape, jitter: Jitter, generator: np.random.Generator
) -> tuple[Field, float]:
    """The map (2, 2) from image to master offsets (row, column); master pixels per image pixel.

    The turned and slanted glyph is scaled to the drawn height, or to the frame's width.
    """
    angle = generator.uniform(-jitter.rotation, jitter.rotation)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    slant = np.array([[1.0, 0.0], [generator.uniform(-jitter.shear, jitter.shear), 1.0]])
    stretch = np.diag([1.0, math.exp(generator.uniform(*np.log(jitter.aspect)))])
    forward = turn @ slant @ stretch
    height, width = np.abs(forward) @ np.array([glyph.height, glyph.width])
    wanted = generator.uniform(*jitter.size) * shape.height
    pixel = max(height / wanted, width / (shape.width * jitter.width))
    return np.linalg.inv(forward) * pixel, pixel


def _wobble(points: Field, size: float, generator: np.random.Generator) -> Field:
    """A slow wave (2, m) along each axis, so that strokes bend as a hand's do."""
    waves = generator.uniform(0.6, 1.4, (2, 2)) * (math.pi / MASTER)
    phases = generator.uniform(0, 2 * math.pi, (2, 1))
    return np.asarray(generator.uniform(-size, size, (2, 1)) * np.sin(waves @ points + phases))


def _elastic(shape: ImageShape, fine: int, size: float, generator: np.random.Generator) -> Field:
    """A smooth random field (2, m) over the fine grid, normal of std `size` at its knots."""
    knots = generator.normal(0, size, (2, KNOTS, KNOTS))
    rows, columns = _spline(shape.height * fine), _spline(shape.width * fine)
    return np.asarray(rows @ knots @ columns.T).reshape(2, -1)


@cache
def _spline(points: int) -> Field:
    """Weights (points, KNOTS) of the cubic spline through evenly spaced knots."""
    from scipy.interpolate import CubicSpline

    weights = CubicSpline(np.linspace(0, 1, KNOTS), np.eye(KNOTS))
    return np.asarray(weights((np.arange(points) + 0.5) / points))


@cache
def _centred_grid(height: int, width: int, fine: int) -> tuple[Field, Field]:
    rows = (np.arange(height * fine) + 0.5) / fine - height / 2
    columns = (np.arange(width * fine) + 0.5) / fine - width / 2
    grid = np.meshgrid(rows, columns, indexing="ij")
    return grid[0].ravel(), grid[1].ravel()


@cache
def _glyph(face: str, letter: str) -> Glyph:
    """The master drawing of one letter, cropped to its outline and padded by MARGIN."""
    try:
        from matplotlib import get_data_path
        from PIL import Image as Pillow
        from PIL import ImageDraw, ImageFont
        from scipy.ndimage import distance_transform_edt
    except ModuleNotFoundError as error:
        raise MissingError(
            f"the letters source needs {error.name}", hint='pip install -e ".[torch]"'
        ) from error
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{face}.ttf", size=2 * MASTER)
    canvas = Pillow.new("L", (4 * MASTER, 4 * MASTER))
    ImageDraw.Draw(canvas).text((MASTER, MASTER), letter, font=font, fill=255)
    cropped = canvas.crop(canvas.getbbox())
    scale = MASTER / cropped.height
    small = cropped.resize((max(1, round(cropped.width * scale)), MASTER))
    ink: NDArray[Any] = np.pad(np.asarray(small) > 127, MARGIN)
    inner = distance_transform_edt(ink)
    # A bar of half width w has mean inner distance w / 2.
    half = 2 * float(inner[ink].mean())
    distance = np.asarray(inner - distance_transform_edt(~ink), dtype=np.float64)
    return Glyph(distance, float(small.height), float(small.width), half)
