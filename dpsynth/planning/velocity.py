"""The velocity model v(x, t, y) that a plan declares, and the caption stream of the dual one."""

from typing import Literal

from pydantic import model_validator

from dpsynth.planning.section import PositiveFloat, PositiveInt, Section, later, misfit

_DUAL = ("heads", "patch", "clamp", "late", "decoupled", "spectral", "text")


class TextStream(Section):
    """Caption tokens of `kind: mmdit` (StraightDP, Table 9): a frozen public table of words.

    A caption is cut into at most `length` words; each is one of `vocabulary` rows of a fixed table
    of `width` numbers.
    """

    width: PositiveInt = 64
    length: PositiveInt = 8
    vocabulary: PositiveInt = 256


class Velocity(Section):
    """The velocity model v(x, t, y) on codes.

    `mmdit`: dual-stream transformer of image and caption tokens with joint attention (section
    3.3). `patch`: side of a square of pixels, or numbers of a code, in one image token. `clamp`:
    the most that a token's norm may be between blocks (B0). `late`: captions reach the image
    in the last `late` blocks alone (l0). `decoupled`: attention to the image and to the caption
    have a softmax each. `spectral`: the most that the operator norm of a weight matrix may be.
    """

    kind: Literal["mlp", "transformer", "mmdit"] = "mlp"
    width: PositiveInt = 128
    depth: PositiveInt = 3
    heads: PositiveInt | None = later(None)
    patch: PositiveInt | None = later(None)
    clamp: PositiveFloat | None = later(None)
    late: PositiveInt | None = later(None)
    decoupled: bool = later(False)
    spectral: PositiveFloat | None = later(None)
    text: TextStream = later(TextStream())

    @model_validator(mode="after")
    def _parts_fit(self) -> "Velocity":
        if self.kind != "mmdit":
            given = [key for key in _DUAL if getattr(self, key) != _default(key)]
            if given:
                raise misfit(
                    f"{', '.join(given)}: only for `kind: mmdit`, and kind is {self.kind}",
                    given[0],
                    hint="write `kind: mmdit`, or leave these keys out",
                )
        if self.heads is not None and self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")
        if self.late is not None and self.late > self.depth:
            raise ValueError(f"late {self.late} is more than depth {self.depth}")
        return self


def _default(key: str) -> object:
    return Velocity.model_fields[key].default
