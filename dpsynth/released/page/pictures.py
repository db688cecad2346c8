"""Pictures as `data:` addresses, small enough for a page."""

from pathlib import Path

import numpy as np

from dpsynth.artifacts.sample_rows import Images
from dpsynth.artifacts.sheet import encode_png
from dpsynth.released.page.render import png_uri

MOST_SIDE = 96  # pixels of a picture on a page; larger ones are shrunk, so that a page stays light
MOST_BYTES = 6_000_000  # of a picture that is taken as it is
_PNG = b"\x89PNG\r\n\x1a\n"

Stamp = dict[str, str]


def uris(images: Images, stamp: Stamp) -> tuple[str, ...]:
    """Images uint8 (n, H, W, C) as PNGs with `stamp` in their text fields.

    Raises MissingError where Pillow is not installed.
    """
    return tuple(png_uri(encode_png(shrunk(image), stamp)) for image in images)


def shrunk(image: Images, most: int = MOST_SIDE) -> Images:
    """An image uint8 (H, W, C) of at most `most` pixels a side; smaller ones stay as they are."""
    height, width = image.shape[:2]
    if max(height, width) <= most:
        return image
    from PIL import Image

    scale = most / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    flat = image[..., 0] if image.shape[2] == 1 else image
    small = np.asarray(Image.fromarray(flat).resize(size, Image.Resampling.LANCZOS))
    return small.reshape(small.shape[0], small.shape[1], -1)


def png_file(path: Path, most: int = MOST_BYTES) -> str | None:
    """A PNG file as it is; None where it is absent, a link, no PNG, or over `most` bytes."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > most:
        return None
    data = path.read_bytes()
    return png_uri(data) if data.startswith(_PNG) else None
