"""One encoded picture to pixels, strictly: the header is judged before anything is decoded."""

import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsynth.errors import MissingError
from dpsynth.planning.schema import ImageShape
from dpsynth.readers.records import MOST_PIXELS, Image

if TYPE_CHECKING:
    from PIL import Image as Pillow

FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")
SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".tif", ".tiff", ".webp"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".gif"}
)
MODES = {1: "L", 3: "RGB"}
GREY_MODES = frozenset({"1", "I", "I;16", "F", "LA", "La"})


class BadPictureError(Exception):
    """Why a picture does not fit; the text is for the curator room."""


def most_bytes(declared: ImageShape | None) -> int:
    """The largest encoded file worth reading: the raw pixels sixteen times, and metadata."""
    pixels = (
        MOST_PIXELS if declared is None else declared.height * declared.width * declared.channels
    )
    return 16 * pixels + (1 << 24)


def decode(content: bytes, declared: ImageShape | None) -> Image:
    """Decode one picture to uint8 (H, W, C).

    With a declared shape the file's mode must be L for one channel and RGB for three, without
    transparency: nothing is converted, resized or rotated. Without one (public data) the result
    is converted to whichever of the two is nearer.

    Raises:
        BadPictureError: damaged, of another shape or mode, animated, of another format, or more
            pixels than declared (a decompression bomb is refused by its header).
        MissingError: Pillow is not installed.
    """
    try:
        from PIL import Image as Pillow
    except ModuleNotFoundError as error:
        raise MissingError("image folders need Pillow", hint='pip install -e ".[torch]"') from error
    try:
        with warnings.catch_warnings():
            # Pillow's warnings would print sizes and values of private files.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            with Pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
                _judge(picture.size, picture.mode, picture.info, declared)
                if getattr(picture, "is_animated", False):
                    raise BadPictureError("more than one frame")
                picture.verify()
            # verify() leaves the picture unusable: open it again to decode.
            with Pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
                pixels: Image = np.asarray(_grey_or_rgb(picture), dtype=np.uint8)
    except BadPictureError:
        raise
    except Exception as error:  # Pillow's decoders promise no set of errors for damaged files
        raise BadPictureError(f"damaged image ({type(error).__name__})") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def _grey_or_rgb(picture: "Pillow.Image") -> "Pillow.Image":
    """The picture itself, or the nearer of the two modes (public data alone gets here)."""
    if picture.mode in MODES.values():
        return picture
    return picture.convert("L" if picture.mode in GREY_MODES else "RGB")


def _judge(
    size: tuple[int, int],
    mode: str,
    info: Mapping[Any, object],
    declared: ImageShape | None,
) -> None:
    width, height = size
    if declared is None:
        if width * height > MOST_PIXELS:
            raise BadPictureError(f"{width} x {height} pixels, at most {MOST_PIXELS}")
        return
    if (height, width) != (declared.height, declared.width):
        raise BadPictureError(
            f"{height} x {width} pixels (height x width), declared "
            f"{declared.height} x {declared.width}"
        )
    if mode != MODES[declared.channels]:
        raise BadPictureError(f"mode {mode}, declared {MODES[declared.channels]}")
    if "transparency" in info:
        raise BadPictureError("a transparent colour")
