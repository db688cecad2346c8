"""Settings of released mean embeddings: DP-MERF, DP-HP and DP-NTK (StraightDP, Table 9).

One mechanism releases counts and sums of features by class; a generator is then fitted to them.
Which features, is `kind`: random Fourier features (DP-MERF), Hermite features (DP-HP), or tangent
features of a random network (DP-NTK).
"""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsynth.planning.section import PositiveFloat, PositiveInt, Rate, Section

Kind = Literal["fourier", "hermite", "tangent"]
MOST_NUMBERS = 2**24
"""Noisy numbers that one release may have, over all classes."""


class EmbeddingBlocks(Section):
    """Shares of the squared joint sensitivity, a^2 : b^2, normalised to sum to one."""

    count: PositiveFloat = 0.01
    sum: PositiveFloat = 0.99

    def weights(self) -> tuple[float, float]:
        """(a, b) with a^2 + b^2 = 1, as `EmbeddingSums` takes them.

        >>> a, b = EmbeddingBlocks(count=9.0, sum=16.0).weights()
        >>> round(a, 12), round(b, 12)
        (0.6, 0.8)
        """
        total = self.count + self.sum
        return math.sqrt(self.count / total), math.sqrt(self.sum / total)


class GeneratorFit(Section):
    """Post-processing: the network that is fitted to the released embedding.

    `width`, `depth`: of the hidden layers; `latent`: numbers of noise an image is made of; `batch`:
    images a step, shared evenly by the classes; `norm`: batch normalisation in the hidden layers;
    `share`: of the features that a step looks at, drawn anew for each (Fourier features alone);
    `spread`: weight of the pairs of generated images that keeps them apart, 1 for the plain squared
    distance.
    """

    width: PositiveInt = 512
    depth: Annotated[int, Field(ge=1, le=8)] = 2
    latent: PositiveInt = 16
    steps: PositiveInt = 6_000
    batch: Annotated[int, Field(ge=4)] = 200
    learning_rate: PositiveFloat = 1e-2
    norm: bool = True
    share: Rate = 0.2
    spread: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.9


class Embedding(Section):
    """The embedding release and its generator.

    `features`: of `fourier`, even. `bandwidth`: of its kernel; None is the median distance of
    public images. `length`, `order`, `pairs`, `pair_order`, `alpha`: of `hermite`: the kernel of
    one pixel (None: the median public difference), orders of sum and product kernel, pixel pairs
    and the product kernel's share. `width`: hidden units of `tangent`; `centred`: take the public
    mean off every image first.
    """

    kind: Kind = "fourier"
    weight: PositiveFloat = 1.0
    features: Annotated[int, Field(ge=2, multiple_of=2)] = 10_000
    bandwidth: PositiveFloat | None = None
    length: PositiveFloat | None = None
    order: Annotated[int, Field(ge=0, le=100)] = 20
    pairs: Annotated[int, Field(ge=0)] = 1_500
    pair_order: Annotated[int, Field(ge=0, le=20)] = 3
    alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    width: PositiveInt = 300
    centred: bool = True
    blocks: EmbeddingBlocks = EmbeddingBlocks()
    spares: Annotated[int, Field(ge=0, le=3)] = 0
    generator: GeneratorFit = GeneratorFit()

    @model_validator(mode="after")
    def _pairs_fit(self) -> "Embedding":
        if self.alpha == 1 and self.pairs == 0:
            raise ValueError("alpha: 1 leaves the pairs alone, and pairs is 0")
        return self

    def dim(self, height: int, width: int, channels: int) -> int:
        """Numbers D of one image's features.

        >>> [Embedding(kind=k).dim(28, 28, 1) for k in ("fourier", "hermite", "tangent")]
        [10000, 40464, 235800]
        """
        pixels = height * width * channels
        if self.kind == "fourier":
            return self.features
        if self.kind == "hermite":
            return pixels * (self.order + 1) + self.pairs * (self.pair_order + 1) ** 2
        return self.width * (pixels + 2)
