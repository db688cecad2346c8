"""What samplers draw, shard by shard, and how several processes write one folder of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.samples import SamplesWriter, shard_size
from dpsynth.artifacts.token_file import Ids
from dpsynth.console import progress
from dpsynth.distributed.ranks import Ranks
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.asked import Asked
from dpsynth.released.card import stamps

SHARD = 500


@dataclass(frozen=True, eq=False)
class Drawn:
    """Images uint8 (n, H, W, C), and the tokens int32 (n, t) that they were decoded from, if any.

    Tokens are kept where they are to be completed: None elsewhere.
    """

    images: NDArray[np.uint8]
    ids: Ids | None = None

    def packed(self) -> bytes:
        """Bytes of both, for another process."""
        return self.images.tobytes() + (b"" if self.ids is None else self.ids.tobytes())

    @classmethod
    def of(cls, data: bytes, shape: tuple[int, int, int], tokens: int) -> "Drawn":
        """The way back from `packed`: images of `shape` with so many tokens each, 0 for none."""
        pixels = int(np.prod(shape))
        count = len(data) // (pixels + 4 * tokens)
        images = np.frombuffer(data, np.uint8, count * pixels).reshape(count, *shape)
        if not tokens:
            return cls(images)
        ids = np.frombuffer(data, np.int32, offset=count * pixels).reshape(count, tokens)
        return cls(images, ids)


Pictures = Callable[[Tensor, torch.Generator], Drawn]
"""Draws for conditions (B,)."""


@dataclass(frozen=True, eq=False)
class Made:
    """How samples are drawn, and their origin; `tokens` beside each image, of that `tokenizer`.

    `placed`: where it matters which images of the folder these are, how those from a place on are.
    """

    pictures: Pictures = field(repr=False)
    origin: dict[str, Any]
    tokens: int = 0
    tokenizer: str | None = None
    placed: Callable[[int], Pictures] | None = field(default=None, repr=False)

    def at(self, first: int) -> Pictures:
        """How images from number `first` on are drawn."""
        return self.pictures if self.placed is None else self.placed(first)


def write(
    folder: Path,
    verified: VerifiedPlan,
    made: Made,
    asked: Asked,
    *,
    source: torch.Generator,
    ranks: Ranks,
) -> None:
    """Draw and write what is missing, shard by shard: one for each process, then the next.

    `made.origin["count"]` images in all. The main process writes, and shows progress.
    """
    plan, count = verified.plan, int(made.origin["count"])
    writer = None
    if ranks.is_main:
        writer = SamplesWriter(
            folder,
            plan.private.classes,
            origin=made.origin,
            stamp=stamps(verified.lock),
            tokenizer=made.tokenizer,
        )
    begun = ranks.tell(None if writer is None else {"written": writer.written})["written"]
    image = plan.private.image
    shape = (image.height, image.width, image.channels)
    size = shard_size(shape, SHARD)
    with progress("sampling", count, completed=begun) as bar:
        for first in range(begun, count, size * ranks.world):
            own = first + size * ranks.rank
            labels = shard_labels(asked, count, own, size)
            drawn = made.at(own)(labels, source).packed() if len(labels) else b""
            for rank, part in enumerate(ranks.gather(drawn)):
                labels = shard_labels(asked, count, first + size * rank, size)
                if writer is not None and len(labels):
                    texts = [asked.captions[y] for y in labels.tolist()]
                    one = Drawn.of(part, shape, made.tokens)
                    writer.add(one.images, asked.classes[labels.numpy()], texts, one.ids)
                    bar.advance(len(labels))
    if writer is not None:
        writer.finish()


def shard_labels(asked: Asked, count: int, first: int, size: int = SHARD) -> Tensor:
    """Conditions of the shard that starts at image `first`; none beyond the last one."""
    return torch.arange(first, max(first, min(count, first + size))) % asked.count
