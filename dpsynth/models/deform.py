"""Random deformation of images, for training on public ones and for moving finished ones a little.

Both are resampled bicubically and clamped: bilinear resampling blurs, and a blur alone moves
Frechet distances by more than what is gained here.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

# Ranges at strength 1, uniform both ways. Lengths are in grid units: half a side is 1.
ROTATION, LOG_SCALE, SHEAR, SHIFT = 0.25, 0.2, 0.3, 0.1
# Standard deviation of the elastic field at each of its KNOTS x KNOTS knots, in grid units.
ELASTIC, KNOTS = 0.06, 5
# How far towards the full dilation and erosion over 3 by 3 pixels thickness may go.
THICKER, THINNER = 0.7, 0.4
# One way of deforming at a time, for what `released.template` asks about a shape.
WAYS = (
    "rotation",
    "shear",
    "width",
    "height",
    "shift across",
    "shift down",
    "thickness",
    "elastic",
    "fine elastic",
)
# Knots and standard deviation of each elastic way.
_ELASTIC_WAYS = {"elastic": (3, 0.05), "fine elastic": (5, 0.05)}
LEAST_SIDE = 16  # below, 3 by 3 pixels are no stroke's edge but the whole stroke


def deform(images: Tensor, strength: float, source: torch.Generator) -> Tensor:
    """Each image (n, C, H, W) in [0, 1] under an affine map, an elastic field and a thickness.

    Every range is multiplied by `strength`; 0 gives the images back. What moves in from outside is
    black. Thickness is left alone below `LEAST_SIDE` pixels.
    """
    if strength == 0.0:
        return images
    count = len(images)
    angle = _uniform(count, strength * ROTATION, source)
    scales = _uniform(2 * count, strength * LOG_SCALE, source).view(2, count).exp()
    shear = _uniform(count, strength * SHEAR, source)
    shift = _uniform(2 * count, strength * SHIFT, source).view(count, 2)
    grid = _affine_grid(images, angle, scales, shear, shift)
    moved = _resampled(images, grid + _elastic(images, strength * ELASTIC, source), "zeros")
    if min(images.shape[-2:]) < LEAST_SIDE:
        return moved
    return _thickness(moved, _uniform(count, strength, source))


def deform_one_way(images: Tensor, way: str, strength: float, source: torch.Generator) -> Tensor:
    """Each image (n, C, H, W) in [0, 1] deformed in one of `WAYS`, by a random amount."""
    count = len(images)
    amount = _uniform(count, strength, source)
    if way == "thickness":
        return _thickness(images, amount) if min(images.shape[-2:]) >= LEAST_SIDE else images
    nothing = torch.zeros(count)
    sizes = {"rotation": ROTATION, "shear": SHEAR, "width": LOG_SCALE, "height": LOG_SCALE}
    sizes |= {"shift across": SHIFT, "shift down": SHIFT}
    moved = {name: amount * size if name == way else nothing for name, size in sizes.items()}
    grid = _affine_grid(
        images,
        moved["rotation"],
        torch.stack([moved["width"], moved["height"]]).exp(),
        moved["shear"],
        torch.stack([moved["shift across"], moved["shift down"]], dim=1),
    )
    if way in _ELASTIC_WAYS:
        knots, size = _ELASTIC_WAYS[way]
        grid = grid + _elastic(images, strength * size, source, knots)
    return _resampled(images, grid, "zeros")


def jitter(
    images: Tensor, rotation: float, scale: float, shift: float, source: torch.Generator
) -> Tensor:
    """Each image (n, C, H, W) in [0, 1] turned, scaled and shifted a little.

    Ranges, uniform both ways: `rotation` in degrees, `scale` a share of the size (the same along
    both axes), `shift` a share of each side. What moves in from outside repeats the border.
    """
    count = len(images)
    angle = _uniform(count, math.radians(rotation), source)
    scales = 1.0 + _uniform(count, scale, source).expand(2, count)
    offset = _uniform(2 * count, 2.0 * shift, source).view(count, 2)
    grid = _affine_grid(images, angle, scales, torch.zeros(count), offset)
    return _resampled(images, grid, "border")


def _affine_grid(
    images: Tensor, angle: Tensor, scales: Tensor, shear: Tensor, shift: Tensor
) -> Tensor:
    """Where each output pixel comes from, (n, H, W, 2): x, y in [-1, 1].

    `angle`, `shear` (n,), `scales` (2, n) along x and y, `shift` (n, 2). The map is
    rotation @ shear @ scales in pixels, so that a long image turns without being sheared.
    """
    cosine, sine = angle.cos(), angle.sin()
    long = images.shape[-2] / images.shape[-1]  # pixels of y over pixels of x for one grid unit
    rows = torch.stack(
        [
            torch.stack([cosine * scales[0], long * (cosine * shear - sine) * scales[1]], dim=1),
            torch.stack([sine * scales[0] / long, (sine * shear + cosine) * scales[1]], dim=1),
        ],
        dim=1,
    )
    theta = torch.cat([rows, shift[:, :, None]], dim=2)
    return functional.affine_grid(theta, list(images.shape), align_corners=False)


def _elastic(images: Tensor, size: float, source: torch.Generator, knots: int = KNOTS) -> Tensor:
    """A smooth displacement (n, H, W, 2) in grid units: few normal knots, upsampled bicubically."""
    drawn = size * torch.randn(len(images), 2, knots, knots, generator=source)
    field = functional.interpolate(
        drawn, size=images.shape[-2:], mode="bicubic", align_corners=True
    )
    return field.permute(0, 2, 3, 1)


def _resampled(images: Tensor, grid: Tensor, outside: str) -> Tensor:
    """Images read at `grid` (n, H, W, 2), bicubically; its overshoots are clamped."""
    found = functional.grid_sample(
        images, grid, mode="bicubic", padding_mode=outside, align_corners=False
    )
    return found.clamp(0.0, 1.0)


def _thickness(images: Tensor, amount: Tensor) -> Tensor:
    """Partly dilated where `amount` (n,) is positive, partly eroded where it is negative."""
    share = amount.view(-1, 1, 1, 1)
    dilated = functional.max_pool2d(images, 3, stride=1, padding=1)
    eroded = -functional.max_pool2d(-images, 3, stride=1, padding=1)
    thicker = images.lerp(dilated, (THICKER * share).clamp(0.0, 1.0))
    return torch.where(share > 0, thicker, images.lerp(eroded, (-THINNER * share).clamp(0.0, 1.0)))


def _uniform(count: int, limit: float, source: torch.Generator) -> Tensor:
    return (2.0 * torch.rand(count, generator=source) - 1.0) * limit
