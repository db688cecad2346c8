"""Which token stands for which piece of which subband, coarse to fine.

DP-Wavelet, section 2.3: each subband is cut into patches of its own. Scale 0 is LL, scale j the
details of level j (1 is the coarsest), whose tokens are those of LH, then HL, then HH, each row by
row. T tokens in all. With no levels there is scale 0 alone, the image in raster order.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.wavelet.transform import Pyramid, Wavelet


@dataclass(frozen=True)
class Scale:
    """One scale's subbands, all (height, width, channels), and the side of their patches.

    Where the patch does not divide a side, the last patches reach over the edge, into zeros.
    """

    bands: int
    height: int
    width: int
    channels: int
    patch: int

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across a subband."""
        return -(-self.height // self.patch), -(-self.width // self.patch)

    @property
    def tokens(self) -> int:
        """Tokens of the scale, its subbands' together."""
        return self.bands * self.grid[0] * self.grid[1]

    @property
    def numbers(self) -> int:
        """Coefficients in a patch."""
        return self.patch**2 * self.channels

    @property
    def coefficients(self) -> int:
        """Coefficients of the scale in an image, those beyond the edge not among them."""
        return self.bands * self.height * self.width * self.channels

    def patchify(self, part: Tensor) -> Tensor:
        """Patches (n, tokens, numbers) of subbands (n, bands, height, width, channels)."""
        (down, across), p = self.grid, self.patch
        over = (0, 0, 0, across * p - self.width, 0, down * p - self.height)
        whole = functional.pad(part, over)
        cut = whole.view(len(part), self.bands, down, p, across, p, self.channels)
        return cut.permute(0, 1, 2, 4, 3, 5, 6).reshape(len(part), self.tokens, self.numbers)

    def unpatchify(self, patches: Tensor) -> Tensor:
        """Subbands (n, bands, height, width, channels) of patches (n, tokens, numbers)."""
        (down, across), p = self.grid, self.patch
        cut = patches.view(len(patches), self.bands, down, across, p, p, self.channels)
        whole = cut.permute(0, 1, 2, 4, 3, 5, 6).flatten(4, 5).flatten(2, 3)
        return whole[:, :, : self.height, : self.width]


@dataclass(frozen=True)
class Layout:
    """The scales of an image, coarse to fine."""

    scales: tuple[Scale, ...]

    @property
    def tokens(self) -> int:
        """All tokens of an image, T."""
        return sum(scale.tokens for scale in self.scales)

    @cached_property
    def scale(self) -> Tensor:
        """The scale of each token, int64 (T,)."""
        counts = torch.tensor([scale.tokens for scale in self.scales])
        return torch.repeat_interleave(torch.arange(len(self.scales)), counts)

    @cached_property
    def band(self) -> Tensor:
        """The subband of each token, int64 (T,): 0 LL, then 1 to 3 for LH, HL, HH."""
        bands = []
        for part in self.scales:
            first = 0 if part.bands == 1 else 1
            names = torch.arange(first, first + part.bands)
            bands.append(names.repeat_interleave(part.tokens // part.bands))
        return torch.cat(bands)

    def coarse(self, scale: int) -> int:
        """How many tokens the scales 0 to `scale` have together."""
        if not 0 <= scale < len(self.scales):
            raise UsageError(
                f"scale {scale} was asked for, expected one of 0 to {len(self.scales) - 1}"
            )
        return sum(part.tokens for part in self.scales[: scale + 1])

    def last(self, tokens: int) -> int:
        """The scale that a prefix of so many tokens ends with.

        Raises:
            UsageError: the prefix ends inside a scale.
        """
        ends = [self.coarse(scale) for scale in range(len(self.scales))]
        if tokens not in ends:
            raise UsageError(
                f"{tokens} tokens were given, which end inside a scale",
                hint=f"give whole scales: {', '.join(map(str, ends))} tokens",
            )
        return ends.index(tokens)

    def split(self, tokens: Tensor) -> list[Tensor]:
        """A prefix of whole scales (n, t, ...) as one tensor a scale."""
        counts = [part.tokens for part in self.scales[: self.last(tokens.shape[1]) + 1]]
        return list(torch.split(tokens, counts, dim=1))

    def patches(self, pyramid: Pyramid) -> list[Tensor]:
        """One tensor (n, tokens, numbers) a scale that the pyramid has."""
        parts = [pyramid.ll[:, None], *pyramid.details]
        return [s.patchify(part) for s, part in zip(self.scales, parts, strict=False)]

    def pyramid(self, patches: list[Tensor]) -> Pyramid:
        """The way back from `patches`."""
        parts = [s.unpatchify(part) for s, part in zip(self.scales, patches, strict=False)]
        return Pyramid(parts[0][:, 0], tuple(parts[1:]))


def layout_of(wavelet: Wavelet, patches: tuple[int, ...]) -> Layout:
    """The layout of a wavelet's images; `patches` has the side of a patch for each scale, J + 1."""
    if len(patches) != wavelet.levels + 1 or min(patches) < 1:
        raise UsageError(
            f"patches {list(patches)} were given for {wavelet.levels} levels",
            hint=f"write {wavelet.levels + 1} sides of 1 or more, coarse to fine",
        )
    channels = wavelet.shape[2]
    return Layout(
        tuple(
            Scale(3 if scale else 1, *wavelet.sides(scale), channels, patch)
            for scale, patch in enumerate(patches)
        )
    )


def even_patches(wavelet: Wavelet, approximation: int = 4, details: int = 4) -> tuple[int, ...]:
    """Sides of patches that give LL and each detail subband about so many rows of tokens.

    >>> even_patches(Wavelet("haar", 3, 64, 64, 3))
    (2, 2, 4, 8)
    """
    sides = [max(wavelet.sides(scale)) for scale in range(wavelet.levels + 1)]
    rows = [approximation, *[details] * wavelet.levels]
    return tuple(-(-side // row) for side, row in zip(sides, rows, strict=True))
