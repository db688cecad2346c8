"""Codes and images as tokens: stretches of a code, squares of an image."""

import math
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.planning.schema import ImageShape

TOKENS = 8
"""Tokens that a code is cut into, at most, where the plan names no patch."""
SIDE = 4
"""Squares along the longer side of an image where the plan names no patch."""


class Patches(Protocol):
    """A way to cut (B, K, d) into `tokens` tokens of `size` numbers, (B, K * tokens, size)."""

    tokens: int
    size: int

    def split(self, x: Tensor) -> Tensor: ...  # noqa: D102
    def join(self, tokens: Tensor, draws: int) -> Tensor: ...  # noqa: D102


class CodePatches:
    """Consecutive numbers of a code (d,); the last token is filled up with zeros."""

    def __init__(self, dim: int, patch: int | None) -> None:
        self.dim = dim
        self.size = patch or math.ceil(dim / TOKENS)
        self.tokens = math.ceil(dim / self.size)

    def split(self, x: Tensor) -> Tensor:
        """See the protocol."""
        batch, draws, dim = x.shape
        padded = functional.pad(x, (0, self.tokens * self.size - dim))
        return padded.view(batch, draws * self.tokens, self.size)

    def join(self, tokens: Tensor, draws: int) -> Tensor:
        """See the protocol."""
        return tokens.view(len(tokens), draws, self.tokens * self.size)[..., : self.dim]


class ImagePatches:
    """Squares of an image (H, W, C), row by row; right and lower ones are filled with zeros."""

    def __init__(self, image: ImageShape, patch: int | None) -> None:
        self.shape = (image.height, image.width, image.channels)
        self.side = patch or math.ceil(max(image.height, image.width) / SIDE)
        self.rows = math.ceil(image.height / self.side)
        self.columns = math.ceil(image.width / self.side)
        self.tokens = self.rows * self.columns
        self.size = self.side**2 * image.channels

    def split(self, x: Tensor) -> Tensor:
        """See the protocol."""
        batch, draws, _ = x.shape
        height, width, channels = self.shape
        side = self.side
        image = x.reshape(batch * draws, height, width, channels)
        image = functional.pad(
            image, (0, 0, 0, self.columns * side - width, 0, self.rows * side - height)
        )
        squares = image.view(-1, self.rows, side, self.columns, side, channels).transpose(2, 3)
        return squares.reshape(batch, draws * self.tokens, self.size)

    def join(self, tokens: Tensor, draws: int) -> Tensor:
        """See the protocol."""
        height, width, channels = self.shape
        squares = tokens.view(-1, self.rows, self.columns, self.side, self.side, channels)
        image = squares.transpose(2, 3).reshape(
            -1, self.rows * self.side, self.columns * self.side, channels
        )
        return image[:, :height, :width].reshape(len(tokens), draws, height * width * channels)


def patches_of(dim: int, image: ImageShape | None, patch: int | None) -> Patches:
    """Squares where an image's shape is given, else stretches of the code.

    Raises:
        UsageError: the image has not `dim` numbers.
    """
    if image is None:
        return CodePatches(dim, patch)
    if image.height * image.width * image.channels != dim:
        raise UsageError(
            f"a velocity model of {dim} numbers was given an image of {image.height} x "
            f"{image.width} x {image.channels}; expected {dim} numbers in all"
        )
    return ImagePatches(image, patch)
