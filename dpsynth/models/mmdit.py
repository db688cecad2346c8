"""The backbone: a dual-stream transformer of image and caption tokens (StraightDP, section 3.3).

v(x, t, y): image tokens h are squares of pixels or stretches of a code, caption tokens e are words
of a frozen table. Time scales and shifts both streams; y enters by its caption alone, so that what
does not see the caption does not see y. docs/maths/backbone.md has the formulas.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models import text
from dpsynth.models.joint_attention import Coupling, DualBlock, clamped
from dpsynth.models.patches import patches_of
from dpsynth.models.preconditioned import (
    FREQUENCIES,
    PreconditionedVelocity,
    most_heads,
    tensor,
    time_features,
    zeroed,
)
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.velocity import Velocity


class DualStreamVelocity(PreconditionedVelocity):
    """Dual-stream MM-DiT with joint attention in its last `late` blocks, in all if None."""

    ids: Tensor
    table: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        settings: Velocity,
        *,
        captions: Sequence[str] | None = None,
        image: ImageShape | None = None,
    ) -> None:
        """Build it for d = `dim` numbers and `classes` labels, label y having `captions[y]`.

        captions: numbers from 0 if None; image: the shape where x are pixels.

        Raises:
            UsageError: not one caption a label, captions with the same tokens, or an image of
                other than `dim` numbers.
        """
        super().__init__(dim, classes, settings.width)
        width, self.image, self.text = settings.width, image, settings.text
        self.clamp, self.spectral = settings.clamp, settings.spectral
        self.patches = patches_of(dim, image, settings.patch)
        self.time_in = nn.Linear(2 * FREQUENCIES, width)
        self.time_out = nn.Linear(width, width)
        self.enter = nn.Linear(self.patches.size, width)
        self.position = nn.Embedding(self.patches.tokens, width)
        self.read = nn.Linear(self.text.width, width)
        self.place = nn.Embedding(self.text.length + 1, width)
        heads = settings.heads or most_heads(width)
        first = settings.depth - (settings.late or settings.depth)
        self.blocks = nn.ModuleList(
            DualBlock(width, heads, _coupling(settings, number, first))
            for number in range(settings.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.leave = zeroed(nn.Linear(width, self.patches.size))
        table = text.table(self.text.vocabulary, self.text.width)
        self.register_buffer("table", table, persistent=False)
        self.captions = _one_each(captions, classes)
        self.set_captions(None)

    def set_captions(self, ids: Tensor | None) -> None:
        """From now on label y means caption `ids[y]`, ids int64 (n, length); null is label n.

        None: the captions that the model was built with, and `classes` is null.

        Kept in memory alone: never part of the model's file. Always worked through at full length,
        so that one caption's length changes nothing about the others.

        Raises:
            UsageError: another shape or type, or ids that are no rows of the table.
        """
        length, vocabulary = self.text.length, self.text.vocabulary
        if ids is None:
            ids = text.tokens(self.captions, length, vocabulary)
            text.require_distinct(self.captions, ids)
            # These are public: no longer than the longest of them.
            self._set(ids, max(1, int((ids != text.PADDING).sum(1).max())))
            return
        if ids.dtype != torch.int64 or ids.ndim != 2 or ids.shape[1] != length:
            raise UsageError(
                f"captions came as {ids.dtype} {tuple(ids.shape)}, expected int64 (n, {length})"
            )
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise UsageError(f"captions hold ids outside a table of {vocabulary} rows")
        self._set(ids, length)

    def _set(self, ids: Tensor, length: int) -> None:
        null = text.tokens([""], length, self.text.vocabulary)
        ids = torch.cat([ids[:, :length].cpu(), null])
        # Each caption starts with one token that is always there: a softmax is never empty, and
        # how far a token listens to the words is for it to say.
        ids = functional.pad(ids, (1, 0), value=text.START)
        self.register_buffer("ids", ids.to(self.table.device), persistent=False)
        self._padded = length == self.text.length or bool((ids == text.PADDING).any())

    def network(self, x: Tensor, times: Tensor, y: Tensor) -> Tensor:
        """See the base class. Inside, tokens lie as (B, K * T, width)."""
        draws = x.shape[1]
        time = self.time_out(functional.silu(self.time_in(time_features(times))))
        time = functional.silu(time)  # (B, K, width)
        image, (caption, seen) = self._image(x), self._caption(y, draws)
        for block in self.blocks:
            image, caption = clamped(image, self.clamp), clamped(caption, self.clamp)
            image, caption = block(image, caption, time, seen)
        out = self.leave(self.norm(clamped(image, self.clamp)))
        return self.patches.join(out, draws)

    def _image(self, x: Tensor) -> Tensor:
        """Image tokens (B, K * T, width) of x (B, K, d)."""
        hidden = self.enter(self.patches.split(x))
        place = torch.arange(self.patches.tokens, device=x.device).expand(len(x), -1)
        return tensor(hidden + self.position(place).repeat(1, x.shape[1], 1))

    def _caption(self, y: Tensor, draws: int) -> tuple[Tensor, Tensor | None]:
        """Caption tokens (B, K * L, width), and which are no padding, bool (B K, 1, 1, L)."""
        ids = self.ids[y].flatten(1)  # (B, L), or (B, K * L) for a label a draw
        repeats = draws if y.ndim == 1 else 1
        length = self.ids.shape[1]
        place = torch.arange(length, device=ids.device).repeat(ids.shape[1] // length)
        hidden = self.read(self.table[ids]) + self.place(place.expand_as(ids))
        seen = None
        if self._padded:
            seen = (ids != text.PADDING).repeat(1, repeats).view(-1, 1, 1, length)
        return hidden.repeat(1, repeats, 1), seen


def _coupling(settings: Velocity, number: int, first: int) -> Coupling:
    """Of block `number`, where the streams meet from block `first` on."""
    return Coupling(
        cross=number >= first,
        decoupled=settings.decoupled,
        last=number == settings.depth - 1,
        bound=settings.clamp,
    )


def _one_each(captions: Sequence[str] | None, classes: int) -> tuple[str, ...]:
    if captions is None:
        return tuple(map(str, range(classes)))
    if len(captions) != classes:
        raise UsageError(
            f"a velocity model of {classes} labels got {len(captions)} captions; expected one each"
        )
    return tuple(captions)
