"""Public images turned into strokes, so that the decoder learns to draw what it never saw.

Clothes alone teach filled shapes. A morphological gradient leaves their outlines, a threshold
moves those, a mask cuts them open, an affine map varies size, slant and place.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dpsynth.models.deform import deform
from dpsynth.planning.schema import Autoencoder

DEFORM_SHARE = 0.8
STROKE_SHARE = 0.7
AFFINE_SHARE = 0.7
LEAST_SIDE = 16  # below, a gradient over 3 by 3 pixels blurs a glyph instead of outlining it


def seen(
    images: Tensor, settings: Autoencoder, source: torch.Generator, drawn: Tensor | None = None
) -> Tensor:
    """Images as training sees them, (n, C, H, W) in [0, 1]: deformed where the plan says so.

    With `deform` above 0 that deformation takes the place of the affine map, and only images that
    are not `drawn` (n,) become strokes before it: letters are strokes already. None: none is drawn.
    """
    if settings.deform <= 0:
        return augment(images, strokes=settings.strokes, source=source)
    if settings.strokes:
        images = _natural_strokes(images, drawn, source)
    deformed = deform(images, settings.deform, source)
    return _some(DEFORM_SHARE, images, deformed, source)


def _natural_strokes(images: Tensor, drawn: Tensor | None, source: torch.Generator) -> Tensor:
    """The images, each that is not `drawn` turned into strokes with probability STROKE_SHARE."""
    natural = torch.ones(len(images), dtype=torch.bool) if drawn is None else ~drawn
    if min(images.shape[-2:]) < LEAST_SIDE or not natural.any():
        return images
    chosen = images[natural]
    changed = images.clone()
    changed[natural] = _some(STROKE_SHARE, chosen, to_strokes(chosen, source), source)
    return changed


def augment(images: Tensor, *, strokes: bool, source: torch.Generator) -> Tensor:
    """Randomly altered copies, (n, C, H, W) in [0, 1]; without `strokes` only moved and scaled.

    Images under `LEAST_SIDE` pixels are never turned into strokes.
    """
    moved = _some(AFFINE_SHARE, images, affine(images, source), source)
    if not strokes or min(images.shape[-2:]) < LEAST_SIDE:
        return moved
    return _some(STROKE_SHARE, moved, to_strokes(moved, source), source)


def affine(images: Tensor, source: torch.Generator) -> Tensor:
    """Each image under an affine map of its own: rotation, scale, shear, shift."""
    count = len(images)
    angle = _uniform(count, -0.35, 0.35, source)
    scale_x, scale_y = (_uniform(count, 0.8, 1.5, source) for _ in range(2))
    shear = _uniform(count, -0.3, 0.3, source)
    cosine, sine = angle.cos(), angle.sin()
    rows = torch.stack(
        [
            torch.stack([cosine * scale_x, (shear - sine) * scale_y], dim=1),
            torch.stack([sine * scale_x, cosine * scale_y], dim=1),
        ],
        dim=1,
    )
    shift = _uniform(2 * count, -0.15, 0.15, source).view(count, 2, 1)
    grid = functional.affine_grid(
        torch.cat([rows, shift], dim=2), list(images.shape), align_corners=False
    )
    return functional.grid_sample(
        images, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )


def to_strokes(images: Tensor, source: torch.Generator) -> Tensor:
    """Outlines of the images or of a level set of them, cut open by a smooth random mask."""
    count = len(images)
    level = _uniform(count, 0.1, 0.7, source).view(-1, 1, 1, 1)
    level_set = torch.sigmoid(12.0 * (images - level))
    shapes = _some(0.6, images, level_set, source)
    outlines = morphological_gradient(shapes)
    thick = functional.max_pool2d(outlines, 3, stride=1, padding=1)
    outlines = _some(0.3, outlines, thick, source)
    peak = outlines.amax(dim=(1, 2, 3), keepdim=True).clamp_min(0.1)
    contrast = _uniform(count, 0.8, 1.3, source).view(-1, 1, 1, 1)
    bright = (outlines / peak * contrast).clamp(0.0, 1.0)
    return _some(0.6, bright, bright * _blobs(images, source), source)


def morphological_gradient(images: Tensor) -> Tensor:
    """Dilation minus erosion over 3 by 3 pixels."""
    dilated = functional.max_pool2d(images, 3, stride=1, padding=1)
    eroded = -functional.max_pool2d(-images, 3, stride=1, padding=1)
    return dilated - eroded


def _blobs(images: Tensor, source: torch.Generator) -> Tensor:
    """Masks (n, 1, H, W) in [0, 1]: coarse noise, interpolated and thresholded softly."""
    noise = torch.randn(len(images), 1, 4, 4, generator=source)
    smooth = functional.interpolate(
        noise, size=images.shape[-2:], mode="bilinear", align_corners=True
    )
    return torch.sigmoid(12.0 * (smooth + 0.2))


def _some(share: float, kept: Tensor, changed: Tensor, source: torch.Generator) -> Tensor:
    """Each image from `changed` with probability `share`, else from `kept`."""
    chosen = torch.rand(len(kept), generator=source) < share
    return torch.where(chosen.view(-1, 1, 1, 1), changed, kept)


def _uniform(count: int, low: float, high: float, source: torch.Generator) -> Tensor:
    return torch.rand(count, generator=source) * (high - low) + low
