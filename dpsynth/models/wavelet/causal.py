"""What predicts one stretch of the tokens: embeddings, causal layers and heads of its own.

Spectral image tokenizer (Esteves et al. 2025; DP-Wavelet, section 2.3): approximation and detail
tokens have separate layer norms, MLPs and attention maps. Here each `Part` is one such set of
weights, and the parts meet in attention alone: a later part sees the keys and values that an
earlier one made, never the other way round. Built of Linear, LayerNorm, Embedding and attention
without weights, so that the private engine has a rule for each.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.preconditioned import most_heads, tensor, zeroed
from dpsynth.planning.velocity import TextStream

EXPANSION = 4
SPREAD = 0.5
"""Standard deviation of an embedding's first entries."""

Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer, each (B, heads, tokens, width / heads)."""


@dataclass(frozen=True)
class Sizes:
    """The transformer's sizes: public facts of a plan, part of its file.

    tokens: T; codes: K, entries of a codebook; coarse: tokens of the scales up to j0, the first
    ones, or None where all tokens share one set of weights (raster order); approximation: tokens
    of a codebook of their own, the first ones, 0 for one codebook; text: how many rows of how
    many numbers a caption has.
    """

    tokens: int
    codes: int
    coarse: int | None = None
    approximation: int = 0
    width: int = 128
    depth: int = 4
    heads: int | None = None
    text: TextStream = field(default_factory=TextStream)

    def __post_init__(self) -> None:
        """Refuse what does not fit together (UsageError)."""
        if min(self.tokens, self.codes, self.width, self.depth) < 1:
            raise UsageError("a transformer got a size below 1: tokens, codes, width or depth")
        if self.coarse is not None and not 0 < self.coarse < self.tokens:
            raise UsageError(
                f"{self.coarse} coarse tokens of {self.tokens} leave nothing to complete",
                hint="choose j0 from 0 to one below the number of levels",
            )
        if not 0 <= self.approximation < self.tokens:
            raise UsageError(f"{self.approximation} tokens of a codebook of their own: too many")
        if self.heads is not None and (self.heads < 1 or self.width % self.heads):
            raise UsageError(f"width {self.width} is no multiple of heads {self.heads}")

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First token and end of each part.

        >>> Sizes(20, 8, coarse=4).bounds, Sizes(20, 8).bounds
        (((0, 4), (4, 20)), ((0, 20),))
        """
        if self.coarse is None:
            return ((0, self.tokens),)
        return ((0, self.coarse), (self.coarse, self.tokens))

    def book(self, token: int) -> int:
        """The codebook of a token."""
        return int(0 < self.approximation <= token)


class Layer(nn.Module):
    """Attention to the caption and to the tokens so far, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_mix, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.text_in = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, EXPANSION * width)
        self.down = nn.Linear(EXPANSION * width, width)

    def forward(
        self, hidden: Tensor, told: Tensor, past: Pair | None, mask: Tensor
    ) -> tuple[Tensor, Pair]:
        """Tokens (B, t, width) one layer on, and keys and values of all tokens so far.

        told (B, S, width): the caption; mask: bool, of (B, 1, t, S + tokens so far).
        """
        query, *own = self.asked(hidden)
        if past is not None:
            own = [torch.cat(pair, dim=2) for pair in zip(past, own, strict=True)]
        keys, values = own
        keys_told, values_told = self.given(told)
        mixed = functional.scaled_dot_product_attention(
            query,
            torch.cat([keys_told, keys], dim=2),
            torch.cat([values_told, values], dim=2),
            mask,
        )
        return self.moved(hidden, mixed), (keys, values)

    def asked(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens (B, t, width)."""
        query, key, value = self._split(self.mix_in(self.norm_mix(hidden)), 3)
        return query, key, value

    def given(self, told: Tensor) -> Pair:
        """Keys and values of the caption (B, S, width)."""
        key, value = self._split(self.text_in(told), 2)
        return key, value

    def moved(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Tokens (B, t, width) after what attention gave, and after the MLP."""
        hidden = hidden + self.mix_out(mixed.transpose(1, 2).reshape(hidden.shape))
        return hidden + tensor(self.down(functional.gelu(self.up(self.norm_up(hidden)))))

    def _split(self, maps: Tensor, count: int) -> tuple[Tensor, ...]:
        """(B, t, count * width) to `count` of (B, heads, t, width / heads)."""
        parts = maps.view(*maps.shape[:2], count, self.heads, -1)
        return parts.permute(2, 0, 3, 1, 4).unbind(0)


def visible(seen: Tensor, asking: int, so_far: int) -> Tensor:
    """Which keys the last `asking` of `so_far` tokens see, bool (B, 1, asking, S + so_far).

    The caption but for its padding (seen: bool (B, S)), the token itself, and those before.
    """
    rows = torch.ones(asking, so_far, dtype=torch.bool, device=seen.device)
    causal = rows.tril(so_far - asking).expand(len(seen), 1, -1, -1)
    return torch.cat([seen[:, None, None].expand(-1, 1, asking, -1), causal], dim=3)


class Part(nn.Module):
    """Everything that predicts the tokens from `start` up to `stop`.

    Place p predicts token p and takes in token p - 1; the very first takes in nothing.
    """

    rows: Tensor

    def __init__(self, sizes: Sizes, start: int, stop: int) -> None:
        super().__init__()
        width, heads = sizes.width, sizes.heads or most_heads(sizes.width)
        self.start, self.stop, self.codes = start, stop, sizes.codes
        books = [sizes.book(max(0, place - 1)) for place in range(start, stop)]
        offsets = torch.tensor(books) - books[0]
        self.register_buffer("rows", sizes.codes * offsets, persistent=False)
        self.enter = _spread(sizes.codes * (int(offsets.max()) + 1), width)
        self.position = _spread(stop - start, width)
        self.read = nn.Linear(sizes.text.width, width)
        self.place = _spread(sizes.text.length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(width)
        # A head for each codebook of the part, the first up to place `turn`.
        two = sizes.book(start) != sizes.book(stop - 1)
        self.turn = sizes.approximation if two else stop
        self.heads = nn.ModuleList(zeroed(nn.Linear(width, self.codes)) for _ in range(1 + two))

    def forward(
        self, before: Tensor, text: Tensor, seen: Tensor, past: list[Pair] | None
    ) -> tuple[Tensor, list[Pair]]:
        """Logits (B, t, K) of tokens from `start` on, and each layer's keys and values so far.

        before: the tokens taken in, int64 (B, t), less one where the very first place takes in
        nothing; text (B, S, numbers), seen (B, S); past: what the part before this one left.
        """
        count = before.shape[1] + (self.start == 0)
        told, so_far = self.told(text), self.start + count
        hidden, mask = self.entered(before, self.start, count), visible(seen, count, so_far)
        kept: list[Pair] = []
        for number, layer in enumerate(self.layers):
            hidden, pair = layer(hidden, told, past[number] if past else None, mask)
            kept.append(pair)
        return self.left(hidden, self.start), kept

    def told(self, text: Tensor) -> Tensor:
        """The caption (B, S, width) as this part reads it."""
        place = torch.arange(text.shape[1], device=text.device).expand(len(text), -1)
        return tensor(self.read(text) + self.place(place))

    def entered(self, before: Tensor, first: int, count: int) -> Tensor:
        """Places `first` and on, (B, count, width), of the tokens that they take in."""
        offset = first - self.start
        place = torch.arange(offset, offset + count, device=before.device)
        hidden = self.position(place.expand(len(before), -1))
        if not before.shape[1]:
            return tensor(hidden)
        nothing = count - before.shape[1]  # 1 where the very first place is among them
        rows = before + self.rows[offset + nothing : offset + count]
        return tensor(hidden + functional.pad(self.enter(rows), (0, 0, nothing, 0)))

    def left(self, hidden: Tensor, first: int) -> Tensor:
        """Logits (B, t, K) of places `first` and on, (B, t, width)."""
        normal = self.norm(hidden)
        turn = min(max(0, self.turn - first), hidden.shape[1])
        stretches = zip(self.heads, (normal[:, :turn], normal[:, turn:]), strict=False)
        found = [head(stretch) for head, stretch in stretches if stretch.shape[1]]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _spread(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    nn.init.normal_(table.weight, std=SPREAD)
    return table
