"""Convolutions as linear maps of unfolded patches: stride, padding, dilation and groups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from dpsynth.private.engine.contributions import (
    Factored,
    Sampled,
    Scratch,
    chains,
    pieces,
    stored,
)
from dpsynth.private.engine.rounding import Squares, in_order
from dpsynth.private.engine.tape import Given, Tape, Tracked, plain


@dataclass(frozen=True)
class Geometry:
    """Two-dimensional sizes; `before`: padding (left, right, top, bottom) put on beforehand."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int, int, int]
    groups: int

    def patches(self, x: Tensor) -> Tensor:
        """Patches (N, G, L, I) of x (N, C, H, W), with I = C / G * kernel size."""
        padded = functional.pad(x, self.before)
        columns = functional.unfold(padded, self.kernel, self.dilation, 0, self.stride)
        return columns.view(len(x), self.groups, -1, columns.shape[-1]).mT


@dataclass
class Convolved:
    """A convolution's gradients by x (B, m, C, H, W) and dy (B, m, O, H', W')."""

    x: Tensor
    g: Tensor
    geometry: Geometry

    @property
    def size(self) -> int:
        """See the protocol."""
        across = self.x.shape[2] // self.geometry.groups
        kernel = self.geometry.kernel
        return self.g.shape[2] * across * kernel[0] * kernel[1]

    @property
    def ghost(self) -> bool:
        """Whether Gram matrices are cheaper; never for several groups, whose gradient is small."""
        if self.geometry.groups > 1:
            return False
        one = slice(0, 1)
        return self._factored(one).ghost

    def squares(self) -> Squares:
        """By pieces of examples: the ghost norm of patches, or of the gradient for groups."""
        patches = self.g[0, :, 0].numel() * max(1, self.size // self.g.shape[2])
        return in_order([self._some(part) for part in pieces(patches, len(self.x))])

    def _some(self, part: slice) -> Squares:
        if self.geometry.groups == 1:
            return self._factored(part).squares()
        return Sampled([self.rows(part)]).squares()

    def rows(self, part: slice) -> Tensor:
        """See the protocol."""
        groups = self.geometry.groups
        if groups == 1:
            return self._factored(part).rows(slice(None))
        x, g = self.x[part], self.g[part]
        a = self.geometry.patches(x.flatten(0, 1))
        a = a.view(*x.shape[:2], *a.shape[1:])  # (b, m, G, L, I)
        a = a.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (b G, m L, I)
        g = g.reshape(*g.shape[:2], groups, g.shape[2] // groups, -1)  # (b, m, G, O / G, L)
        g = g.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)  # (b G, O / G, m L)
        return torch.bmm(g, a).view(len(x), -1)

    def add_weighted(self, totals: list[Tensor], factors: Tensor, scratch: Scratch) -> None:
        """The weight gradient of the scaled output gradients, by torch's own kernel, in chains."""
        geometry = self.geometry
        across = self.x.shape[2] // geometry.groups
        shape = (self.g.shape[2], across, *geometry.kernel)
        for part in chains(len(self.x)):
            scaled = scratch.scaled(self.g[part], factors[part])
            weight = conv2d_weight(  # type: ignore[no-untyped-call]
                functional.pad(self.x[part].flatten(0, 1), geometry.before),
                shape,
                scaled.flatten(0, 1),
                stride=geometry.stride,
                dilation=geometry.dilation,
                groups=geometry.groups,
            )
            totals[0] += torch.flatten(weight)

    def take(self, index: Tensor) -> "Convolved":
        """See the protocol."""
        return replace(self, x=self.x[index], g=self.g[index])

    def _factored(self, part: slice) -> Factored:
        x, g = self.x[part], self.g[part]
        patches = self.geometry.patches(x.flatten(0, 1)).squeeze(1)  # (b m, L, I)
        a = patches.reshape(len(x), -1, patches.shape[-1])
        return Factored(a, g.flatten(3).mT.reshape(len(x), -1, g.shape[2]))


def convolution(apply: Callable[..., Tensor], axes: int) -> Callable[..., Any]:
    """The rule of `conv1d` or `conv2d`, called `apply`."""

    def rule(  # noqa: PLR0917 (as torch calls it)
        tape: Tape,
        func: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not tape.strangers(x, weight, bias):
            return tape.derive(func, x, weight, bias, stride, padding, dilation, groups)
        if isinstance(x, Tracked) or tape.strangers(weight, bias) or x.ndim != axes + 2:
            tape.refuse(func, x, weight, bias)
        kept = x.detach()
        output = apply(x, plain(weight), plain(bias), stride, padding, dilation, groups)
        examples = tape.examples
        geometry = _geometry(plain(weight), stride, padding, dilation, groups)

        def given(g: Tensor) -> Given:
            found: Given = []
            if isinstance(bias, Tracked):
                sums = stored(g).reshape(examples, -1, g.shape[1], g[0, 0].numel()).sum((1, 3))
                found.append(([bias], Sampled([sums])))
            if isinstance(weight, Tracked):
                flat = [_images(stored(y), examples) for y in (kept, g)]
                found.append(([weight], Convolved(flat[0], flat[1], geometry)))
            return found

        used = [one for one in (weight, bias) if isinstance(one, Tracked)]
        return tape.record("convolution", output, used, given, kept)

    return rule


def _geometry(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    axes = weight.ndim - 2
    kernel, stride, dilation = tuple(weight.shape[2:]), _each(stride, axes), _each(dilation, axes)
    if padding == "same":  # torch puts the odd one at the end
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        around = [(one // 2, one - one // 2) for one in total]
    else:
        around = [(one, one) for one in _each(0 if padding == "valid" else padding, axes)]
    if axes == 1:
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
        around = [(0, 0), *around]
    (top, bottom), (left, right) = around
    return Geometry(kernel, stride, dilation, (left, right, top, bottom), groups)  # type: ignore[arg-type]


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """One number an axis: torch also takes one for all of them."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    return numbers * axes if len(numbers) == 1 else numbers


def _images(x: Tensor, examples: int) -> Tensor:
    """Images (B, m, C, H, W) of images or signals (B m, C, ...)."""
    flat = x if x.ndim == 4 else x.unsqueeze(2)
    return flat.reshape(examples, -1, *flat.shape[1:])
