"""Vector quantisation: a latent becomes the number of the nearest of K entries, by angle.

DP-Wavelet, section 2.3 (the VQ-GAN paradigm). Entries have norm 1 and few coordinates, which keeps
codebooks in use (ViT-VQGAN). They are learnt on public data by `vector-quantize-pytorch`:
exponential averages, k-means at the start where a batch suffices, and entries that hardly any
latent uses drawn anew. A trained codebook is its entries alone; using one needs no library.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.errors import MissingError, UsageError


class Codebook(nn.Module):
    """K entries of norm 1, (K, d)."""

    entries: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 2 or dim < 2:
            raise UsageError(
                f"a codebook of {size} entries of {dim} numbers was asked for, expected 2 or more"
            )
        self.register_buffer("entries", functional.normalize(torch.randn(size, dim), dim=-1))

    @property
    def size(self) -> int:
        """K."""
        return len(self.entries)

    def ids(self, latents: Tensor) -> Tensor:
        """The nearest entries' numbers, int64 (..., ), of latents (..., d)."""
        near = functional.normalize(latents, dim=-1) @ self.entries.T
        return near.argmax(dim=-1)

    def latents(self, ids: Tensor) -> Tensor:
        """Entries (..., d) of their numbers (...).

        Raises:
            UsageError: a number outside 0 to K - 1.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.size:
            raise UsageError(
                f"token ids from {int(ids.min())} to {int(ids.max())} were given, "
                f"expected 0 to {self.size - 1}"
            )
        return self.entries[ids]


@dataclass(frozen=True, eq=False)
class Quantised:
    """Latents (n, t, d) moved to their entries, gradients kept; ids (n, t); commitment ()."""

    latents: Tensor
    ids: Tensor
    commitment: Tensor


class Learner(nn.Module):
    """What learns a codebook in public training; torch's global generator draws.

    `dead`: an entry whose average use falls below this share of an even one's, among the
    `tokens` that a batch quantises, is drawn anew from the batch.
    """

    def __init__(self, codebook: Codebook, *, decay: float, dead: float, tokens: int) -> None:
        super().__init__()
        self.codebook = codebook
        size, dim = codebook.entries.shape
        self.inner = _library()(
            dim=dim,
            codebook_size=size,
            decay=decay,
            use_cosine_sim=True,
            kmeans_init=tokens >= size,  # else there are not enough latents to start from
            threshold_ema_dead_code=dead * tokens / size,
            rotation_trick=True,
        )

    def forward(self, latents: Tensor) -> Quantised:
        """Quantise latents (n, t, d) and learn from them."""
        moved, ids, commitment = self.inner(latents)
        return Quantised(moved, ids, commitment.sum())

    def settle(self) -> None:
        """Give the codebook the entries as they are now."""
        self.codebook.entries.copy_(functional.normalize(self.inner.codebook.detach(), dim=-1))


def _library() -> Any:
    try:
        from vector_quantize_pytorch import VectorQuantize
    except ImportError:
        raise MissingError(
            "training a tokenizer needs vector-quantize-pytorch, which is not installed",
            hint="pip install -e '.[torch]'",
        ) from None
    return VectorQuantize


@dataclass(frozen=True)
class Use:
    """How a codebook is used: the share of entries that occur, and exp of their entropy.

    An even use of all K entries has share 1 and perplexity K.

    >>> Use.of(torch.tensor([0, 0, 1, 1]), 4)
    Use(share=0.5, perplexity=2.0)
    """

    share: float
    perplexity: float

    @classmethod
    def of(cls, ids: Tensor, size: int) -> "Use":
        """Of ids, any shape, into a codebook of `size` entries."""
        counts = torch.bincount(ids.flatten(), minlength=size).double()
        rates = counts / counts.sum()
        return cls(
            float((counts > 0).double().mean()),
            float(torch.special.entr(rates).sum().exp()),
        )
