"""A compact dual-stream transformer (MM-DiT) for timing: image and caption tokens attend jointly.

Esser et al. 2024 (Stable Diffusion 3), section 4, with the shared modulation of Chen et al. 2023
(PixArt-alpha, section 2.3): one map of the time for all blocks, and a table of offsets a block.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS, CAPTION_TOKENS, CAPTION_WIDTH = 16, 8, 64
HEAD_WIDTH = 32


class DualStream(nn.Module):
    """Velocity (B, K, T, C) at x (B, K, T, C), t (B, K), caption (B, L, D): K draws an example."""

    def __init__(
        self, width: int, depth: int, tokens: int, kind: type[nn.Module] | None = None
    ) -> None:
        """Take sizes; `kind(shape)`: the layer that a bare parameter is made of (see `Bare`)."""
        super().__init__()
        bare = kind or Bare
        self.enter = nn.Linear(CHANNELS, width)
        self.position = bare((tokens, width))
        self.read = nn.Linear(CAPTION_WIDTH, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.modulate = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(width, bare, last=i == depth - 1) for i in range(depth))
        self.leave = nn.Linear(width, CHANNELS)

    def forward(self, x: Tensor, t: Tensor, caption: Tensor) -> Tensor:
        """Work through (B K, T, width), an example's draws side by side."""
        draws = x.shape[1]
        image = self.position(self.enter(x.flatten(0, 1)))
        text = self.read(caption).repeat_interleave(draws, dim=0)
        time = self.modulate(functional.silu(self.time(t.reshape(-1, 1)))).unflatten(1, (6, -1))
        for block in self.blocks:
            image, text = block(image, text, time)
        out = self.leave(functional.layer_norm(image, image.shape[-1:]))
        return out.unflatten(0, x.shape[:2])


class Bare(nn.Module):
    """Adds a parameter of its own to each row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.value = nn.Parameter(0.02 * torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        """(N, *shape) plus the parameter (*shape)."""
        return x + self.value


class Stream(nn.Module):
    """One stream's own weights in a block; `reads`: it only gives keys and values, as the last."""

    def __init__(self, width: int, bare: type[nn.Module], *, reads: bool = False) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.table = bare((6, width))
        self.mix_in = nn.Linear(width, 3 * width)
        self.full = not reads
        if self.full:
            self.mix_out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def project(self, tokens: Tensor, modulation: list[Tensor]) -> Tensor:
        """Queries, keys and values (3, N, heads, T, head width)."""
        heads = self.mix_in(_modulated(tokens, *modulation[:2])).unflatten(2, (3, self.heads, -1))
        return heads.permute(2, 0, 3, 1, 4)

    def join(self, tokens: Tensor, mixed: Tensor, modulation: list[Tensor]) -> Tensor:
        """The stream's tokens (N, T, width) after attention and its own MLP."""
        tokens = tokens + modulation[2] * self.mix_out(mixed)
        inner = functional.gelu(self.up(_modulated(tokens, *modulation[3:5])))
        return tokens + modulation[5] * self.down(inner)


class Block(nn.Module):
    """Both streams, joined in one attention; the last block's text is only read."""

    def __init__(self, width: int, bare: type[nn.Module], *, last: bool) -> None:
        super().__init__()
        self.image, self.text = Stream(width, bare), Stream(width, bare, reads=last)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of both streams (N, T, width), modulated by time (N, 6, width)."""
        first = list(self.image.table(time).unsqueeze(2).unbind(1))
        second = list(self.text.table(time).unsqueeze(2).unbind(1))
        both = torch.cat([self.text.project(text, second), self.image.project(image, first)], dim=3)
        mixed = functional.scaled_dot_product_attention(*both.unbind(0))
        mixed = mixed.transpose(1, 2).flatten(2)  # (N, L + T, width)
        length = text.shape[1]
        image = self.image.join(image, mixed[:, length:], first)
        if self.text.full:
            text = self.text.join(text, mixed[:, :length], second)
        return image, text


def _modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(tokens, tokens.shape[-1:]) * (1 + scale) + shift


def draw(batch: int, draws: int, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Images (B, T, C), captions (B, L, D), times (B, K) and flow noise (B, K, T, C)."""
    source = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, tokens, CHANNELS, generator=source),
        torch.randn(batch, CAPTION_TOKENS, CAPTION_WIDTH, generator=source),
        torch.rand(batch, draws, generator=source),
        torch.randn(batch, draws, tokens, CHANNELS, generator=source),
    )


def losses(module: nn.Module, z: Tensor, caption: Tensor, t: Tensor, xi: Tensor) -> Tensor:
    """Rectified-flow loss an example (B,), averaged over its draws."""
    target = z[:, None] - xi
    at = xi + t[..., None, None] * target
    return (module(at, t, caption) - target).square().mean(dim=(1, 2, 3))
