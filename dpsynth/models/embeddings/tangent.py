"""Tangent features of a random ReLU network (DP-NTK: Yang et al. 2023, sections 3 and 4).

Of a network g(x) = sum_j a_j relu(h_j), h_j = w_j.x', x' = (x - c, 1), with random signs a_j and
w_j ~ N(0, I), the features are its gradient in all parameters, divided by the gradient's norm:

    f(x) = (a_j 1[h_j > 0] x', relu(h_j))_j / norm.

All that a record's features are made of is whole numbers below 2^53 (h, gates, squares and their
sums): only elementwise products and divisions round.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.models.embeddings.space import (
    EXACT_BITS,
    Array,
    Images,
    Part,
    Shape,
    digest_of,
    flat,
    levels,
    require_exact,
    require_shape,
)
from dpsynth.models.seeding import generator

STEPS = 128
"""Steps of a weight in one standard deviation of it."""
_LEVELS = 255


class TangentMap:
    """Gradient of a random network of `width` hidden units, normalised.

    Args:
        shape: H, W, C.
        width: hidden units m; D = m (H W C + 2).
        centre: public whole grey levels (H, W, C) uint8 that are taken off every image.
        seed: public; fixes the network.

    Raises:
        UsageError: a centre of another shape, or a width that whole numbers do not hold.
    """

    radius = 1.0
    elementwise = False

    def __init__(self, shape: Shape, width: int, centre: NDArray[np.uint8], seed: int) -> None:
        if width < 1 or centre.shape != shape or centre.dtype != np.uint8:
            raise UsageError(f"tangent features: width {width}, centre {centre.shape} for {shape}")
        self.shape, self.width = shape, width
        inputs = math.prod(shape) + 1
        source = generator(seed)
        drawn = torch.randn((width, inputs), generator=source, dtype=torch.float64)
        self._weights: Array = torch.round(drawn * STEPS).numpy()
        signs = torch.randint(2, (width,), generator=source) * 2 - 1
        self._signs: Array = signs.double().numpy()
        self._centre = levels(centre[None])[0]
        # h is cut to so many bits that the squares of all m of them add up exactly.
        require_exact(self._weights, _LEVELS, "tangent weights")
        largest = _LEVELS * float(np.abs(self._weights).sum(axis=1).max())
        fits = (EXACT_BITS - 1 - math.ceil(math.log2(width))) // 2
        self._drop = max(0, math.ceil(math.log2(largest + 1)) - fits)
        self._unit = 2.0**self._drop / STEPS  # of cut h, in grey levels
        self._torch = (
            torch.from_numpy(self._weights / STEPS).float().T.contiguous(),
            signs.float(),
            torch.from_numpy(self._centre / _LEVELS).float(),
        )

    @property
    def dim(self) -> int:
        """D = m (H W C + 2): a unit's inputs and bias, then all units' outputs."""
        return self.width * (int(self._weights.shape[1]) + 1)

    def encode_exact_many(self, images: Images) -> Array:
        """Features (n, D) of records."""
        require_shape(images, self.shape)
        inputs: Array = np.empty((len(images), self._weights.shape[1]))
        inputs[:, :-1] = levels(images) - self._centre
        inputs[:, -1] = _LEVELS
        hidden = inputs @ self._weights.T  # whole numbers
        outputs = np.maximum(np.floor(np.ldexp(hidden, -self._drop)), 0.0)
        gates = (hidden > 0).astype(np.float64)
        square = np.square(inputs).sum(axis=1) * gates.sum(axis=1)  # whole numbers
        square += np.square(outputs).sum(axis=1) * self._unit**2
        norms = np.sqrt(np.maximum(square, 1.0))[:, None]
        first = (gates * self._signs)[:, :, None] * (inputs / norms)[:, None, :]
        last = outputs * self._unit / norms
        return np.concatenate([first.reshape(len(images), -1), last], axis=1)

    def _parts(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Signed gates (B, m); inputs (B, d + 1) and outputs (B, m), both over the norm."""
        weights, signs, centre = self._torch
        pixels = flat(images, self.shape) - centre
        inputs = torch.cat([pixels, torch.ones(len(pixels), 1)], dim=1)
        hidden = inputs @ weights
        outputs, gates = hidden.relu(), (hidden.detach() > 0).float()
        square = inputs.square().sum(1) * gates.sum(1) + outputs.square().sum(1)
        norms = square.clamp_min(_LEVELS**-2).sqrt()[:, None]
        return gates * signs, inputs / norms, outputs / norms

    def sums(self, images: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums (Y, D) of features, without the features themselves; weights (Y, B)."""
        gates, inputs, outputs = self._parts(images)
        first = []
        for row in weights:
            mine = row.nonzero()[:, 0]  # of one class, as a rule: the others need no product
            first.append((gates[mine] * row[mine, None]).T @ inputs[mine])
        return torch.cat([torch.stack(first).flatten(1), weights @ outputs], dim=1)

    def squares(self, images: Tensor) -> Tensor:
        """Ones (B,), up to an image that no unit sees."""
        return torch.ones(len(images))

    def part(self, share: float, source: torch.Generator) -> Part:
        """All of it."""
        del share, source
        return Part(self)

    def digest(self) -> str:
        """SHA-256 of the network and the centre."""
        return digest_of(self._weights, self._signs, self._centre)
