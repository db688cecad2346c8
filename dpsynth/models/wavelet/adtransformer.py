"""The approximation-details transformer, causal by scale.

DP-Wavelet, section 2.3: approximation (scale 0) and detail tokens (all others) have separate layer
normalisations, MLPs and attention blocks, and a token attends to its own and all coarser scales.

That is computed scale by scale and without a mask: what scale s becomes is made by the same
operations on the same shapes however many scales follow, so it is the same to the bit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDER = 4


class KindLayer(nn.Module):
    """What one kind of tokens has in a block: pre-norm attention projections and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, _WIDER * width), nn.Linear(_WIDER * width, width)

    def asked(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value (n, heads, t, width / heads) of tokens (n, t, width)."""
        parts = self.mix_in(self.norm_in(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def moved(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Tokens after what attention gave (n, heads, t, width / heads), and after the MLP."""
        hidden = hidden + self.mix_out(mixed.transpose(1, 2).flatten(2))
        inner: Tensor = self.down(functional.gelu(self.up(self.norm_mlp(hidden))))
        return hidden + inner


class ADBlock(nn.Module):
    """One block: a layer for each kind of tokens, joined in attention."""

    def __init__(self, width: int, heads: int, kinds: int = 2) -> None:
        super().__init__()
        self.kinds = nn.ModuleList([KindLayer(width, heads) for _ in range(kinds)])

    def layer(self, scale: int) -> KindLayer:
        """The layer of a scale's kind."""
        layer = self.kinds[min(scale, 1)]
        assert isinstance(layer, KindLayer)
        return layer

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        """New tokens (n, T_s, width) of each scale, coarse to fine."""
        asked = [self.layer(s).asked(hidden) for s, hidden in enumerate(scales)]
        moved: list[Tensor] = []
        for s, hidden in enumerate(scales):
            keys = torch.cat([key for _, key, _ in asked[: s + 1]], dim=2)
            values = torch.cat([value for _, _, value in asked[: s + 1]], dim=2)
            mixed = functional.scaled_dot_product_attention(asked[s][0], keys, values)
            moved.append(self.layer(s).moved(hidden, mixed))
        return moved


class ADTransformer(nn.Module):
    """Blocks over the scales of an image, from one map a subband to another.

    ins and outs: how many numbers a token of each scale has before and after; tokens: how many
    tokens each scale has; bands: how many subbands. Places are learnt. One scale has one kind of
    tokens, and nothing for the other.
    """

    def __init__(
        self,
        ins: list[int],
        outs: list[int],
        tokens: list[int],
        bands: list[int],
        *,
        width: int,
        depth: int,
        heads: int,
    ) -> None:
        super().__init__()
        self.ins = nn.ModuleList(BandLinear(n, width, b) for n, b in zip(ins, bands, strict=True))
        self.outs = nn.ModuleList(BandLinear(width, n, b) for n, b in zip(outs, bands, strict=True))
        kinds = min(2, len(tokens))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(kinds))
        self.places = nn.ParameterList(0.02 * torch.randn(t, width) for t in tokens)
        self.blocks = nn.ModuleList(ADBlock(width, heads, kinds) for _ in range(depth))

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        """Tokens (n, T_s, outs_s) of tokens (n, T_s, ins_s), for the first scales or all."""
        hidden = [self.ins[s](part) + self.places[s] for s, part in enumerate(scales)]
        for block in self.blocks:
            hidden = block(hidden)
        return [self.outs[s](self.norms[min(s, 1)](part)) for s, part in enumerate(hidden)]


class BandLinear(nn.Module):
    """A linear map for each subband's tokens, which lie one subband after the other."""

    def __init__(self, before: int, after: int, bands: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(before, after) for _ in range(bands))

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, bands * t, after) of (n, bands * t, before)."""
        parts = tokens.chunk(len(self.maps), dim=1)
        return torch.cat([one(part) for one, part in zip(self.maps, parts, strict=True)], dim=1)
