"""One block of the dual-stream transformer: image and caption tokens, joined in attention.

Esser et al. 2024 (SD3, section 4): each stream has its own weights, attention runs over both.
StraightDP, section 3.3, constrains how. Tokens lie as (B, K * T, width): an example's K draws side
by side on the second axis, so that the first axis of every layer is the example.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.preconditioned import tensor


@dataclass(frozen=True)
class Coupling:
    """How a block's streams meet.

    cross: whether they do; decoupled: each softmax sees one stream; last: nothing reads the text
    tokens that it would make; bound: B0, the most that a token's norm and an inflow's may be.
    """

    cross: bool
    decoupled: bool
    last: bool
    bound: float | None


@dataclass(frozen=True)
class _Asked:
    """A stream as attention sees it.

    normed (B, K * T, width); query (of a stream that asks), key and value (B K, heads, T, width /
    heads); scale and shift (B, K, width) of the MLP.
    """

    normed: Tensor
    query: Tensor | None
    key: Tensor
    value: Tensor
    late: tuple[Tensor, ...]


class Stream(nn.Module):
    """One stream's weights in a block.

    asks: it has queries and an MLP; without, it gives keys and values alone. inflow: it has a map
    for what comes from the other stream by a softmax of its own.
    """

    def __init__(self, width: int, heads: int, *, asks: bool, inflow: bool) -> None:
        super().__init__()
        self.width, self.heads, self.asks = width, heads, asks
        self.modulate = nn.Linear(width, (4 if asks else 2) * width)
        self.mix_in = nn.Linear(width, (3 if asks else 2) * width)
        if asks:
            self.mix_out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        if inflow:
            self.gate = nn.Linear(width, width)
            self.inflow = nn.Linear(width, width, bias=False)

    def asked(self, hidden: Tensor, time: Tensor) -> _Asked:
        """Project tokens (B, K * T, width), scaled and shifted by time (B, K, width)."""
        scale, shift, *late = self.modulate(time).chunk(4 if self.asks else 2, dim=-1)
        normed = self._modulated(hidden, scale, shift)
        length = hidden.shape[1] // time.shape[1]
        parts = self.mix_in(normed).view(
            -1, length, 3 if self.asks else 2, self.heads, self.width // self.heads
        )
        *query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return _Asked(normed, query[0] if query else None, key, value, tuple(late))

    def moved(self, hidden: Tensor, mixed: Tensor, late: tuple[Tensor, ...]) -> Tensor:
        """Tokens (B, K * T, width) after what attention gave, and after the stream's own MLP."""
        hidden = hidden + self.mix_out(self._flat(mixed, hidden))
        inner = self.up(self._modulated(hidden, *late))
        return hidden + tensor(self.down(functional.silu(inner)))

    def taken(self, own: _Asked, mixed: Tensor, bound: float | None) -> Tensor:
        """The inflow (B, K * T, width): what a softmax over the other stream gave, by own gates.

        The gates let what a caption adds depend on the token that it is added to, though a caption
        of one word leaves a softmax little to choose from. No bias: nothing gives nothing.
        """
        gates = functional.silu(self.gate(own.normed))
        return clamped(self.inflow(self._flat(mixed, own.normed) * gates), bound)

    def _modulated(self, hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        normal = functional.layer_norm(hidden, (self.width,))
        batch, count = scale.shape[:2]
        draws = normal.view(batch, count, hidden.shape[1] // count, self.width)
        return (draws * (1 + scale[:, :, None]) + shift[:, :, None]).view_as(hidden)

    @staticmethod
    def _flat(mixed: Tensor, like: Tensor) -> Tensor:
        """(B K, heads, T, width / heads) to (B, K * T, width)."""
        return mixed.transpose(1, 2).reshape(like.shape)


class DualBlock(nn.Module):
    """Image and text tokens, one step on."""

    def __init__(self, width: int, heads: int, coupling: Coupling) -> None:
        super().__init__()
        self.coupling = coupling
        inflow = coupling.cross and coupling.decoupled
        self.image = Stream(width, heads, asks=True, inflow=inflow)
        self.text = Stream(
            width, heads, asks=not coupling.last, inflow=inflow and not coupling.last
        )

    def forward(
        self, image: Tensor, text: Tensor, time: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """New tokens of both streams; the last block gives the text back as it came.

        image (B, K * T, width), text (B, K * L, width), time (B, K, width); seen: bool (B K, 1, 1,
        L), False for padding, None where there is none.
        """
        if self.coupling.cross and not self.coupling.decoupled:
            return self._joint(image, text, time, seen)
        ours = self.image.asked(image, time)
        theirs = self.text.asked(text, time)
        own = self._own(image, ours)
        if self.coupling.cross:
            own = own + self._inflow(ours, theirs, seen)
        if self.coupling.last:
            return own, text
        read = self.text.moved(text, _attention(theirs, theirs, seen), theirs.late)
        if self.coupling.cross:
            mixed = _attention(theirs, ours, None)
            read = read + self.text.taken(theirs, mixed, self.coupling.bound)
        return own, read

    def update_parts(
        self, image: Tensor, text: Tensor | None, time: Tensor, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The image's new tokens as F(h) and G(h, e), whose sum they are (section 3.3, item 3).

        Shapes as in `forward`. Without a caption (None), and in a block whose streams do not
        meet, G is zero.

        Raises:
            UsageError: one softmax over both streams, which has no such parts.
        """
        if self.coupling.cross and not self.coupling.decoupled:
            raise UsageError(
                "one softmax over image and caption has no caption-independent part",
                hint="write velocity.decoupled: true",
            )
        ours = self.image.asked(image, time)
        own = self._own(image, ours)
        if text is None or not self.coupling.cross:
            return own, torch.zeros_like(own)
        return own, self._inflow(ours, self.text.asked(text, time), seen)

    def _own(self, image: Tensor, ours: _Asked) -> Tensor:
        """F(h): attention of the image to itself, and its MLP."""
        return self.image.moved(image, _attention(ours, ours, None), ours.late)

    def _inflow(self, ours: _Asked, theirs: _Asked, seen: Tensor | None) -> Tensor:
        """G(h, e), of norm at most B0 a token."""
        return self.image.taken(ours, _attention(ours, theirs, seen), self.coupling.bound)

    def _joint(
        self, image: Tensor, text: Tensor, time: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One softmax over image and text, image first (SD3)."""
        ours, theirs = self.image.asked(image, time), self.text.asked(text, time)
        length = ours.key.shape[2]
        queries = [part.query for part in (ours, theirs) if part.query is not None]
        mixed = functional.scaled_dot_product_attention(
            torch.cat(queries, dim=2),
            torch.cat([ours.key, theirs.key], dim=2),
            torch.cat([ours.value, theirs.value], dim=2),
            None if seen is None else functional.pad(seen, (length, 0), value=True),
        )
        own = self.image.moved(image, mixed[:, :, :length], ours.late)
        if self.coupling.last:
            return own, text
        return own, self.text.moved(text, mixed[:, :, length:], theirs.late)


def _attention(asks: _Asked, gives: _Asked, seen: Tensor | None) -> Tensor:
    """Softmax attention (B K, heads, T, width / heads) of one stream's queries to one stream."""
    if asks.query is None:
        raise UsageError("a stream that only gives keys and values was asked for attention")
    return functional.scaled_dot_product_attention(asks.query, gives.key, gives.value, seen)


def clamped(tokens: Tensor, bound: float | None) -> Tensor:
    """Each token (..., width) projected onto the ball of radius B0 (section 3.3, item 1).

    h min(1, B0 / |h|), written so that it is the identity inside, zero included.
    """
    if bound is None:
        return tokens
    norms: Tensor = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    return tokens * (bound / norms.clamp(min=bound))
