"""How many numbers a code has: filled in where the image decides it, checked where it is given."""

from typing import Any

from dpsynth.planning.frozen import Latent
from dpsynth.planning.section import misfit
from dpsynth.planning.tokens import Tokens
from dpsynth.planning.wavelets import Canvas, code_of, require_band


def with_code(values: Any) -> Any:
    """A plan's raw values with the `code` that follows from the image, and may be left out.

    What is wrong in them is found later.
    """
    try:
        space, image = values["representation"], values["private"]["image"]
        kind = space["kind"]
        wavy = kind == "wavelet" or "levels" in space  # a misspelt kind is named later
        if "code" in space or not (wavy or kind in {"pixels", "tokens", "latent"}):
            return values
        if kind == "latent":
            code = _latent_numbers(values.get("prior"))
        elif kind == "tokens":
            code = _private_tokens(values.get("tokens"), image)
        elif wavy:
            code = code_of(space, image)
        else:
            code = image["height"] * image["width"] * image.get("channels", 1)
    except (TypeError, KeyError, AttributeError):
        return values
    return {**values, "representation": {**space, "code": code}}


def _private_tokens(tokens: Any, image: Any) -> int:
    """Private tokens by a plan's raw values; 1 where they are at fault, which is found later."""
    try:
        height, width = image["height"], image["width"]
        return max(1, Tokens.model_validate(tokens).private_tokens(height, width))
    except (TypeError, KeyError, ValueError, ArithmeticError):
        return 1


def _latent_numbers(prior: Any) -> int:
    """Numbers of a latent by a plan's raw values; 1 where they are at fault, found later."""
    try:
        return Latent.model_validate(prior["latent"]).dim
    except (TypeError, KeyError, ValueError):
        return 1


def require_code(
    shape: tuple[int, int, int],
    kind: str,
    code: int,
    *,
    levels: int | None,
    padded: Canvas | None,
    tokens: Tokens | None,
    latent: Latent | None = None,
) -> None:
    """Raise where images of `shape` (height, width, channels) have no code of so many numbers."""
    height, width, channels = shape
    if kind == "tokens" and tokens is not None:
        count = tokens.private_tokens(height, width)
        if code != count:
            raise misfit(
                f"representation.code is {code}, and tokens.private: {tokens.private} makes "
                f"{count} tokens of an image private; leave `code` out",
                "representation.code",
                hint="write `representation: {kind: tokens}`, without `code`",
            )
    if kind == "latent" and latent is not None and code != latent.dim:
        raise misfit(
            f"representation.code is {code}, and prior.latent has {latent.dim} numbers; leave "
            "`code` out",
            "representation.code",
            hint="write `representation: {kind: latent}`, without `code`",
        )
    pixels = height * width * channels
    if kind == "wavelet" and levels is not None:
        require_band(height, width, channels, code=code, levels=levels, padded=padded)
    if kind == "pixels" and code != pixels:
        raise misfit(
            f"representation.code is {code}, and kind: pixels has {pixels} numbers "
            "(height x width x channels); leave `code` out",
            "representation.code",
            hint="write `representation: {kind: pixels}`, without `code`",
        )
    if kind == "pca" and code > pixels:
        raise misfit(
            f"representation.code is {code}, and PCA of {pixels} pixels "
            f"(height x width x channels) has at most {pixels} numbers",
            "representation.code",
            hint=f"write `code: {pixels}` or less",
        )
