"""One encoded picture to pixels, strictly: the header is judged before anything is decoded."""

import io
import struct
import warnings
import zlib
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
_PNG = b"\x89PNG\r\n\x1a\n"
_NUMBER = struct.Struct(">I").unpack_from
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
        with Pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
            _judge(picture.size, picture.mode, picture.info, declared)
            if getattr(picture, "is_animated", False):
                raise BadPictureError("more than one frame")
            if declared is not None and any(part[0] == "libtiff" for part in picture.tile):
                # That library tells the terminal itself what is wrong with a private file.
                raise BadPictureError("a compressed TIFF: save it as PNG, or uncompressed")
            if picture.format == "PNG":
                _require_sums(content)
            found = _grey_or_rgb(picture)
            pixels = np.frombuffer(found.tobytes(), dtype=np.uint8)
            return pixels.reshape(found.height, found.width, -1)
    except BadPictureError:
        raise
    except Exception as error:  # Pillow's decoders promise no set of errors for damaged files
        raise BadPictureError(f"damaged image ({type(error).__name__})") from error


def silence() -> None:
    """Let Pillow's modules warn of nothing in this process: texts may hold sizes and values.

    Once, before the threads start: `warnings.catch_warnings` around each picture is not for
    threads. Nothing hangs on a warning: `_judge` refuses by the header what Pillow warns of.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _require_sums(content: bytes) -> None:
    """Check the sum of every chunk of a PNG, which Pillow does not where pixels are decoded.

    Raises:
        ValueError, struct.error: a sum differs, or the file ends too early.
    """
    place = len(_PNG)
    while True:
        length, kind = struct.unpack_from(">I4s", content, place)
        end = place + 8 + length
        if zlib.crc32(memoryview(content)[place + 4 : end]) != _NUMBER(content, end)[0]:
            raise ValueError("a chunk's sum differs")
        if kind == b"IEND":
            return
        place = end + 4


def brought_to(image: Image, shape: ImageShape) -> Image:
    """One image uint8 (h, w, 1 or 3) as uint8 (H, W, C): Lanczos, grey copied, colour to luma."""
    if image.shape == (shape.height, shape.width, shape.channels):
        return image
    from PIL import Image as Pillow

    picture = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture = picture.convert(MODES[shape.channels])
    if picture.size != (shape.width, shape.height):
        picture = picture.resize((shape.width, shape.height), Pillow.Resampling.LANCZOS)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels.reshape(shape.height, shape.width, shape.channels)


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
