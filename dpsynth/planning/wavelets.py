"""The wavelet code space of a plan: which wavelets there are, and how large the LL0 band is.

DP-Wavelet, section 3.1: J levels of a two-dimensional wavelet transform leave an approximation
LL0 of 1/2^J of each side. Here its coefficients are the code.
"""

import difflib
from typing import Annotated, Any

from pydantic import Field

from dpsynth.planning.section import PositiveInt, Section, misfit

WAVELETS = (
    "haar",
    *(f"db{n}" for n in range(1, 39)),
    *(f"sym{n}" for n in range(2, 21)),
    *(f"coif{n}" for n in range(1, 18)),
)
"""Orthonormal wavelets of PyWavelets. (`dmey` is left out: it is orthonormal to 1e-3 alone.)"""
LEAST = 2
"""Least side of an LL0 band."""
Levels = Annotated[int, Field(ge=1, le=8)]


class Canvas(Section):
    """Size that images are padded to by mirroring, as evenly as it goes, and cropped from."""

    height: PositiveInt
    width: PositiveInt


def canvas_of(height: int, width: int, levels: int, padded: Canvas | None) -> tuple[int, int]:
    """Sides that are transformed: the declared ones, else the next multiples of 2^levels.

    >>> canvas_of(28, 30, 2, None)
    (28, 32)
    """
    if padded is not None:
        return padded.height, padded.width
    block = 2**levels
    return -(-height // block) * block, -(-width // block) * block


def band_of(height: int, width: int, levels: int, padded: Canvas | None) -> tuple[int, int]:
    """Sides (h, w) of the LL0 band of images of this size.

    >>> band_of(28, 28, 2, Canvas(height=32, width=32))
    (8, 8)
    """
    rows, columns = canvas_of(height, width, levels, padded)
    return rows >> levels, columns >> levels


def require_wavelet(
    kind: str, wavelet: str | None, levels: int | None, padded: Canvas | None
) -> None:
    """Raise where the keys of a representation do not fit together."""
    given = {"wavelet": wavelet, "levels": levels, "padded": padded}
    if kind != "wavelet":
        extra = [key for key, value in given.items() if value is not None]
        if extra:
            raise misfit(
                f"{', '.join(extra)}: only for `kind: wavelet`, and kind is {kind}",
                extra[0],
                hint="write them under `tokens:`"
                if kind == "tokens"
                else "write `kind: wavelet`, or leave these keys out",
            )
        return
    missing = [key for key in ("wavelet", "levels") if given[key] is None]
    if missing:
        raise misfit(
            f"kind: wavelet needs the key `{missing[0]}`",
            "kind",
            hint="write `representation: {kind: wavelet, wavelet: haar, levels: 2}`",
        )
    if wavelet not in WAVELETS:
        raise misfit(
            f'wavelet "{str(wavelet)[:60]}" is not known; expected haar, db1 to db38, sym2 to '
            "sym20, or coif1 to coif17 (the orthonormal ones of PyWavelets)",
            "wavelet",
            hint=nearest_wavelet(str(wavelet)),
        )


def require_band(
    height: int, width: int, channels: int, *, code: int, levels: int, padded: Canvas | None
) -> None:
    """Raise where an image of this size has no LL0 band of `code` numbers."""
    if padded is not None:
        _require_canvas(height, width, levels, padded)
    rows, columns = band_of(height, width, levels, padded)
    if min(rows, columns) < LEAST:
        raise misfit(
            f"representation.levels is {levels}, which leaves {rows} x {columns} of an image of "
            f"{height} x {width}; expected at least {LEAST} x {LEAST}",
            "representation.levels",
            hint=_fewer(height, width, levels, padded),
        )
    if code != rows * columns * channels:
        raise misfit(
            f"representation.code is {code}, and levels: {levels} leave {rows} x {columns} x "
            f"{channels} = {rows * columns * channels} numbers; leave `code` out",
            "representation.code",
            hint="write `representation: {kind: wavelet, ...}` without `code`",
        )


def code_of(space: Any, image: Any) -> int:
    """Numbers in the LL0 band by a plan's raw values; 1 where they are at fault, found later."""
    try:
        padded = space.get("padded")
        canvas = None if padded is None else Canvas.model_validate(padded)
        levels = min(int(space["levels"]), 64)
        rows, columns = band_of(image["height"], image["width"], levels, canvas)
        return max(1, rows * columns * int(image.get("channels", 1)))
    except (TypeError, KeyError, AttributeError, ValueError):
        return 1


def _require_canvas(height: int, width: int, levels: int, padded: Canvas) -> None:
    for name, side, given in (
        ("height", height, padded.height),
        ("width", width, padded.width),
    ):
        if given % 2**levels or not side <= given <= 2 * side:
            least = -(-side // 2**levels) * 2**levels
            raise misfit(
                f"representation.padded.{name} is {given}; expected a multiple of "
                f"2^levels = {2**levels} from {side} to {2 * side} (the image's {name}, and twice "
                "that)",
                f"representation.padded.{name}",
                hint=f"write `{name}: {least}`, or leave `padded` out",
            )


def _fewer(height: int, width: int, levels: int, padded: Canvas | None) -> str:
    for fewer in range(levels - 1, 0, -1):
        if min(band_of(height, width, fewer, padded)) >= LEAST:
            return f"write `levels: {fewer}`" + (" or less" if fewer > 1 else "")
    return "such small images need no wavelet: write `representation: {kind: pixels}`"


def nearest_wavelet(given: str) -> str:
    """What to type where a wavelet is not known."""
    near = difflib.get_close_matches(given.lower(), WAVELETS, n=1, cutoff=0.5)
    return f"did you mean `wavelet: {near[0]}`?" if near else "write `wavelet: haar`"
