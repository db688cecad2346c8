"""The spectral tokenizer: images to tokens by scale, and any prefix of scales back to an image.

DP-Wavelet, section 2.3, after Esteves et al. 2025 (SIT-SC, causal by scale on both sides): wavelet
transform, patches of each subband, an encoder, vector quantisation, a decoder. The encoder is
causal too, so that coarse tokens are those of the coarse coefficients alone: a coarse image from
any source has them, and what is private about fine detail never enters them.
"""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.models.threads import one_thread
from dpsynth.models.wavelet.adtransformer import ADTransformer, BandLinear
from dpsynth.models.wavelet.layout import Layout, layout_of
from dpsynth.models.wavelet.quantise import Codebook, Learner
from dpsynth.models.wavelet.transform import Pyramid, Wavelet


@dataclass(frozen=True)
class TokenizerSettings:
    """What decides a tokenizer's shape.

    patches: the side of a patch in LL, then in the details of level 1 (the coarsest) to `levels`;
    hidden, depth, heads: of encoder and decoder each; codebook: K; code: numbers in an entry;
    shared: one codebook for both kinds of tokens instead of one for each. With no levels there is
    one kind, and so one codebook, either way.
    """

    height: int
    width: int
    channels: int
    levels: int
    patches: tuple[int, ...]
    wavelet: str = "haar"
    hidden: int = 96
    depth: int = 2
    heads: int = 4
    codebook: int = 256
    code: int = 8
    shared: bool = False

    @property
    def codebooks(self) -> int:
        """How many codebooks there are: of approximation and details, or one for all tokens."""
        return 1 if self.shared or not self.levels else 2

    def to_text(self) -> str:
        """JSON, for a file's metadata."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> "TokenizerSettings":
        """Read what `to_text` wrote. Raises UsageError for anything else."""
        try:
            facts: dict[str, Any] = json.loads(text)
            return cls(**{**facts, "patches": tuple(facts["patches"])})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError("these are no settings of a tokenizer") from error


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """A training pass over n images, one tensor a scale.

    wanted and given (n, T_s, numbers_s): standardised patches as they are and as decoded; ids
    (n, T_s); commitment ().
    """

    wanted: list[Tensor]
    given: list[Tensor]
    ids: list[Tensor]
    commitment: Tensor


class Tokenizer(nn.Module):
    """Images (n, H, W, C) in [0, 1] to ids (n, T) below K, and back."""

    centre: Tensor
    spread: Tensor

    def __init__(self, settings: TokenizerSettings) -> None:
        super().__init__()
        if settings.hidden % settings.heads:
            raise UsageError(
                f"hidden is {settings.hidden}, which {settings.heads} heads do not divide"
            )
        self.settings = settings
        self.wavelet = Wavelet(
            settings.wavelet,
            settings.levels,
            settings.height,
            settings.width,
            settings.channels,
        )
        self.layout: Layout = layout_of(self.wavelet, settings.patches)
        scales = self.layout.scales
        self.register_buffer("centre", torch.zeros(*self.wavelet.sides(0), settings.channels))
        self.register_buffer("spread", torch.ones(len(scales)))
        numbers, latents = [s.numbers for s in scales], [settings.code for _ in scales]
        self.encoder = self._transformer(numbers, latents)
        self.decoder = self._transformer(latents, numbers)
        self.codebooks = nn.ModuleList(
            Codebook(settings.codebook, settings.code) for _ in range(settings.codebooks)
        )

    def _transformer(self, ins: list[int], outs: list[int]) -> ADTransformer:
        scales = self.layout.scales
        return ADTransformer(
            ins,
            outs,
            [scale.tokens for scale in scales],
            [scale.bands for scale in scales],
            width=self.settings.hidden,
            depth=self.settings.depth,
            heads=self.settings.heads,
        )

    def codebook(self, scale: int) -> Codebook:
        """The codebook of a scale's tokens."""
        codebook = self.codebooks[min(scale, len(self.codebooks) - 1)]
        assert isinstance(codebook, Codebook)
        return codebook

    @torch.no_grad()
    def standardise(self, pyramid: Pyramid) -> None:
        """Take centre and spread from public images: LL's mean by place, each scale's RMS."""
        self.centre.copy_(pyramid.ll.mean(0))
        parts = [pyramid.ll - self.centre, *pyramid.details]
        roots = torch.stack([part.square().mean().sqrt() for part in parts])
        self.spread.copy_(roots.clamp_min(1e-6))
        self._start()

    def _start(self) -> None:
        """Outputs of the decoder start at the mean image."""
        for maps in self.decoder.outs:
            assert isinstance(maps, BandLinear)
            for linear in maps.maps:
                assert isinstance(linear, nn.Linear)
                linear.weight.mul_(0.1)
                linear.bias.zero_()

    @torch.no_grad()
    def encode(self, images: Tensor, upto: int | None = None) -> Tensor:
        """Ids int64 (n, T) of images (n, H, W, C), bytes or floats; those of scales <= `upto`."""
        return self.encode_pyramid(self.wavelet(images), upto)

    @torch.no_grad()
    def encode_pyramid(self, pyramid: Pyramid, upto: int | None = None) -> Tensor:
        """Ids (n, t) of the scales that a pyramid has, or of those up to `upto`."""
        pyramid = pyramid if upto is None else pyramid.upto(upto)
        latents = self.encoder(self._standard(pyramid))
        return torch.cat([self.codebook(s).ids(part) for s, part in enumerate(latents)], dim=1)

    @torch.no_grad()
    def encode_coarse(self, images: Tensor) -> Tensor:
        """Ids (n, t) of scale 0 from small images (n, h, w, C) in [0, 1] in LL's size."""
        small = images.float() / 255.0 if images.dtype == torch.uint8 else images
        return self.encode_pyramid(Pyramid(self.wavelet.coarse_coefficients(small), ()))

    def encode_exact(self, images: Tensor, upto: int | None = None) -> Tensor:
        """As `encode`, a forward pass on one thread for each record and no other.

        So a record's ids are those bits whatever was encoded before or beside it. Freeze the
        parameters, as trained and loaded tokenizers do: kernels round otherwise for others.
        """
        last = len(self.layout.scales) - 1 if upto is None else upto
        ids = torch.zeros(len(images), self.layout.coarse(last), dtype=torch.int64)
        with one_thread():
            for row, image in zip(ids, images, strict=True):
                row.copy_(self.encode(image[None].clone(), last)[0])
        return ids

    @torch.no_grad()
    def decode_pyramid(self, ids: Tensor) -> Pyramid:
        """Coefficients of ids (n, t), a prefix of whole scales; the others are left out."""
        latents = [self.codebook(s).latents(part) for s, part in enumerate(self.layout.split(ids))]
        return self._original(self.decoder(latents))

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Images (n, H, W, C) in [0, 1] of ids (n, t), a prefix of whole scales."""
        return self.wavelet.inverse(self.decode_pyramid(ids)).clamp(0.0, 1.0)

    def decode_coarse(self, ids: Tensor) -> Tensor:
        """Small images (n, h, w, C) in [0, 1], LL's size, of ids (n, t) that start with scale 0."""
        pyramid = self.decode_pyramid(ids[:, : self.layout.coarse(0)])
        return self.wavelet.coarse_image(pyramid.ll).clamp(0.0, 1.0)

    def forward(self, images: Tensor, learners: "list[Learner]") -> Rebuilt:
        """A training pass; `learners` are those of the codebooks, in their order."""
        wanted = self._standard(self.wavelet(images))
        latents, ids, commitment = list[Tensor](), list[Tensor](), images.new_zeros(())
        encoded = self.encoder(wanted)
        cuts = [0, len(encoded)] if len(learners) == 1 else [0, 1, len(encoded)]
        for learner, (start, end) in zip(learners, pairwise(cuts), strict=True):
            group = encoded[start:end]  # the scales that share a codebook
            sizes = [part.shape[1] for part in group]
            quantised = learner(torch.cat(group, dim=1))
            latents += quantised.latents.split(sizes, dim=1)
            ids += quantised.ids.split(sizes, dim=1)
            commitment = commitment + quantised.commitment
        return Rebuilt(wanted, self.decoder(latents), ids, commitment)

    def _standard(self, pyramid: Pyramid) -> list[Tensor]:
        """Standardised patches (n, T_s, numbers_s) by scale."""
        parts = [pyramid.ll - self.centre, *pyramid.details]
        scaled = [part / self.spread[s] for s, part in enumerate(parts)]
        return self.layout.patches(Pyramid(scaled[0], tuple(scaled[1:])))

    def _original(self, patches: list[Tensor]) -> Pyramid:
        """The way back from `_standard`."""
        pyramid = self.layout.pyramid(patches)
        details = tuple(part * self.spread[s] for s, part in enumerate(pyramid.details, 1))
        return Pyramid(pyramid.ll * self.spread[0] + self.centre, details)
