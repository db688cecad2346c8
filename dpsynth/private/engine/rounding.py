"""Bounds on what float32 loses, so that no contribution passes C (docs/maths/dpsgd.md, D2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1024


def squared_norms(sample: Tensor) -> Tensor:
    """Squared norms (B,) of rows (B, P): float32 within blocks of 1024, float64 across them.

    Relative error below 1024 * 2^-24, a sixteenth of MARGIN, whatever P is.
    """
    whole = sample.shape[1] // BLOCK * BLOCK
    rest: Tensor = torch.linalg.vector_norm(sample[:, whole:], dim=1).double().square()
    if whole == 0:
        return rest
    view = sample[:, :whole].unfold(1, BLOCK, BLOCK)  # (B, P / 1024, 1024), not a copy
    blocks: Tensor = torch.linalg.vector_norm(view, dim=2)
    return rest + blocks.double().square().sum(dim=1)


@dataclass
class Squares:
    """Squared norms of some parameters' per-example gradients, and what bounds their error.

    found: (B,) float64. Of ghost norms also the traces (B,) of the two Gram matrices, that is
    sum_t |a_t|^2 and sum_t |g_t|^2, and `terms`, the numbers that one rounding chain adds.
    """

    found: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    terms: int = 0


def added(squares: list[Squares]) -> tuple[Tensor, Tensor]:
    """Squared norms (B,) over all parameters, and the most by which they can be too small.

    A ghost norm's square is short of the true one by at most `terms` u (sum_t |a_t| |g_t|)^2,
    also where the tokens' products cancel and the norm itself is far smaller (D2). The sum is at
    most the square root of the two traces' product (Cauchy and Schwarz). Underflow comes on top.
    """
    found = torch.stack([one.found for one in squares]).sum(0)
    ghosts = [one for one in squares if one.left is not None and one.right is not None]
    if not ghosts:
        return found, torch.zeros_like(found)
    # Each by the limits of its own type: a module may hold float32 and float64 layers.
    limits = [torch.finfo(one.left.dtype) for one in ghosts if one.left is not None]
    left = torch.stack([one.left.double() for one in ghosts if one.left is not None])
    right = torch.stack([one.right.double() for one in ghosts if one.right is not None])
    relative = [0.505 * x.eps * one.terms for x, one in zip(limits, ghosts, strict=True)]
    lost = [4 * x.tiny * float(one.terms) ** 3 for x, one in zip(limits, ghosts, strict=True)]
    short = left.new_tensor(relative) @ (left * right)
    return found, short + left.new_tensor(lost) @ (left + right + 1)


def in_order(parts: list[Squares]) -> Squares:
    """Squares of consecutive examples, of one kind and with the same terms."""
    first = parts[0]
    if first.left is None:
        return Squares(torch.cat([one.found for one in parts]))
    left = torch.cat([one.left for one in parts if one.left is not None])
    right = torch.cat([one.right for one in parts if one.right is not None])
    return Squares(torch.cat([one.found for one in parts]), left, right, first.terms)
