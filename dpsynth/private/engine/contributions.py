"""What each example adds to one parameter's gradient, in the form that is cheapest to keep.

Every form gives the squared norm of each example's own gradient, the gradients themselves on
demand, and their weighted sum. Shapes: B examples, T tokens (all axes of an example but the
last, noise draws included), a (B, T, I) activations, g (B, T, O) output gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpsynth.private.engine.rounding import Squares, squared_norms

GHOST = 30
"""Multiply-adds of two Gram matrices that cost as much as writing and reading one number of a
materialised gradient (measured on two CPUs, docs/engine.md)."""
CHAIN = 128
"""Examples that one float32 product adds; beyond them sums are float64 (D2 of dpsgd.md)."""
_PIECE = 2**22
"""Numbers materialised at once: pieces of this size stay in the allocator's hands."""
_VECTOR = 1024
"""Gradients of at most so many numbers (biases, scales) are added in float64 throughout."""


class Scratch:
    """Memory for one scaled factor at a time, so that it stays in the cache."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def scaled(self, x: Tensor, factors: Tensor) -> Tensor:
        """Give factors (B,) times x (B, ...); gone at the next call."""
        if self._flat.numel() < x.numel() or self._flat.dtype != x.dtype:
            self._flat = x.new_empty(x.numel())
        out = self._flat[: x.numel()].view(x.shape)
        c = factors.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))
        return torch.mul(x, c, out=out)


class Contribution(Protocol):
    """Per-example gradients of one parameter, or of a layer's weight and bias in a row."""

    @property
    def size(self) -> int:
        """Numbers in one example's gradient."""

    def squares(self) -> Squares:
        """Squared norms by example."""

    def rows(self, part: slice) -> Tensor:
        """Gradients (b, P) of some of the examples."""

    def add_weighted(self, totals: list[Tensor], factors: Tensor, scratch: Scratch) -> None:
        """Add the sum over examples of factor times gradient to flat float64 totals, by parameter.

        factors: (B,) float64.
        """

    def take(self, index: Tensor) -> "Contribution":
        """The same of the examples at `index` alone."""


@dataclass
class Sampled:
    """Materialised gradients (b, P) in pieces that hold all examples in order."""

    pieces: list[Tensor]
    exact: bool = False

    @property
    def size(self) -> int:
        """See the protocol."""
        return self.pieces[0].shape[1]

    def squares(self) -> Squares:
        """No allowance: norm and sum use these very numbers."""
        found = [squared_norms(piece) for piece in self.pieces]
        return Squares(found[0] if len(found) == 1 else torch.cat(found))

    def rows(self, part: slice) -> Tensor:
        """See the protocol."""
        whole = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return whole[part]

    def add_weighted(self, totals: list[Tensor], factors: Tensor, scratch: Scratch) -> None:
        """In float64, some columns at a time, for vectors and where `exact`; others in chains."""
        del scratch
        parts = torch.split(factors, [len(piece) for piece in self.pieces])
        for c, s in zip(parts, self.pieces, strict=True):
            if self.exact or self.size <= _VECTOR:
                wide = max(1, _PIECE // max(1, len(s)))
                for start in range(0, self.size, wide):
                    columns = slice(start, start + wide)
                    totals[0][columns] += c @ s[:, columns].double()
                continue
            for part in chains(len(s)):
                totals[0] += c[part].to(s.dtype) @ s[part]

    def take(self, index: Tensor) -> "Sampled":
        """See the protocol."""
        return Sampled([self.rows(slice(None))[index]], self.exact)


@dataclass
class Factored:
    """A linear map's gradients sum_t g_t a_t^T (O, I), kept as their factors (Bu et al. 2022).

    bias: the bias's gradient sum_t g_t (O,) belongs to it, as if a_t had one more number, 1.
    """

    a: Tensor
    g: Tensor
    bias: bool = False

    @property
    def size(self) -> int:
        """See the protocol."""
        return (self.a.shape[2] + self.bias) * self.g.shape[2]

    def split(self) -> list[Contribution]:
        """Weight and bias on their own."""
        weight: list[Contribution] = [Factored(self.a, self.g)]
        return [*weight, Sampled([self.g.sum(dim=1)])] if self.bias else weight

    @property
    def ghost(self) -> bool:
        """Whether the norm is cheaper by Gram matrices than by the gradient itself."""
        tokens, inputs, outputs = self.a.shape[1], self.a.shape[2], self.g.shape[2]
        return tokens**2 * (inputs + outputs) <= GHOST * inputs * outputs

    def squares(self) -> Squares:
        """|sum_t g_t a_t^T|^2 = sum_tt' (a_t . a_t') (g_t . g_t') (Li et al. 2021, section 4)."""
        tokens = self.a.shape[1]
        if tokens == 1:
            left = torch.linalg.vector_norm(self.a, dim=(1, 2)).square() + float(self.bias)
            right = torch.linalg.vector_norm(self.g, dim=(1, 2)).square()
            found = left.double() * right
        else:
            a, g = torch.bmm(self.a, self.a.mT), torch.bmm(self.g, self.g.mT)
            if self.bias:
                a += 1
            # Traces by a product with ones on the diagonal: torch's sums over short axes are slow.
            diagonal = torch.eye(tokens, dtype=a.dtype, device=a.device).flatten()
            left, right = a.flatten(1) @ diagonal, g.flatten(1) @ diagonal
            found = a.mul_(g).sum(dim=2).sum(dim=1, dtype=torch.float64)
        return Squares(found, left, right, self.a.shape[2] + self.g.shape[2] + tokens + 9)

    def rows(self, part: slice) -> Tensor:
        """See the protocol."""
        return torch.bmm(self.g[part].mT, self.a[part]).flatten(1)

    def add_weighted(self, totals: list[Tensor], factors: Tensor, scratch: Scratch) -> None:
        """By chains, so that each is read from memory once; the smaller factor is scaled."""
        tokens, inputs, outputs = self.a.shape[1], self.a.shape[2], self.g.shape[2]
        repeated = factors.repeat_interleave(tokens)
        for part in chains(len(factors)):
            a, g, c = self.a[part], self.g[part], factors[part]
            if self.bias:  # float64 over tokens and examples
                each = repeated[part.start * tokens : part.stop * tokens]
                totals[1] += each @ g.reshape(-1, outputs).double()
            if inputs <= outputs:
                a = scratch.scaled(a, c)
            else:
                g = scratch.scaled(g, c)
            totals[0] += (g.reshape(-1, outputs).T @ a.reshape(-1, inputs)).flatten()

    def take(self, index: Tensor) -> "Factored":
        """See the protocol."""
        return Factored(self.a[index], self.g[index], self.bias)


@dataclass
class Gathered:
    """An embedding's gradients: g_t (B, T, D) added into row ids_t (B, T) of (rows, D)."""

    ids: Tensor
    g: Tensor
    table: int

    @property
    def size(self) -> int:
        """See the protocol."""
        return self.table * self.g.shape[2]

    def squares(self) -> Squares:
        """The ghost norm with a_t . a_t' = 1 where the ids agree, else 0."""
        gram = torch.bmm(self.g, self.g.mT)
        right = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
        same = self.ids[:, :, None] == self.ids[:, None, :]
        found = gram.mul_(same).sum(dim=2).sum(dim=1, dtype=torch.float64)
        tokens = self.g.shape[1]
        left = torch.full_like(right, float(tokens))
        return Squares(found, left, right, self.g.shape[2] + tokens + 8)

    def rows(self, part: slice) -> Tensor:
        """See the protocol."""
        ids, g = self.ids[part], self.g[part]
        found = g.new_zeros(len(g), self.table, g.shape[2])
        return found.scatter_add_(1, ids[:, :, None].expand_as(g), g).flatten(1)

    def add_weighted(self, totals: list[Tensor], factors: Tensor, scratch: Scratch) -> None:
        """In float64: many examples add into one row, a chain as long as the batch."""
        del scratch
        scaled = (self.g * factors[:, None, None]).flatten(0, 1)
        totals[0].view(self.table, -1).index_add_(0, self.ids.flatten(), scaled.double())

    def take(self, index: Tensor) -> "Gathered":
        """See the protocol."""
        return Gathered(self.ids[index], self.g[index], self.table)


def stored(x: Tensor) -> Tensor:
    """The values that norm and sum share: half-precision numbers exactly, as float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def chains(examples: int) -> Iterator[slice]:
    """Slices of at most `CHAIN` examples."""
    for start in range(0, examples, CHAIN):
        yield slice(start, min(examples, start + CHAIN))


def pieces(size: int, examples: int, most: int = _PIECE) -> Iterator[slice]:
    """Slices of examples of `size` numbers each that hold at most `most` numbers."""
    step = max(1, most // max(1, size))
    for start in range(0, examples, step):
        yield slice(start, min(examples, start + step))


def materialised(kept: Contribution, examples: int, *, exact: bool) -> Sampled:
    """The gradients themselves, piece by piece."""
    return Sampled([kept.rows(part) for part in pieces(kept.size, examples)], exact)


def joined(kept: list[Contribution], examples: int, *, exact: bool) -> Contribution:
    """One contribution for all uses of a parameter: the norm is that of the sum over uses.

    Uses of one kind are one use with more tokens; others are added example by example.
    """
    if len(kept) == 1:
        return kept[0]
    factored = [one for one in kept if isinstance(one, Factored)]
    if len(factored) == len(kept):
        return Factored(
            torch.cat([one.a for one in factored], 1), torch.cat([one.g for one in factored], 1)
        )
    gathered = [one for one in kept if isinstance(one, Gathered)]
    if len(gathered) == len(kept):
        ids = torch.cat([one.ids for one in gathered], 1)
        return Gathered(ids, torch.cat([one.g for one in gathered], 1), gathered[0].table)
    sums = []
    for part in pieces(kept[0].size, examples):
        total = kept[0].rows(part).clone()
        for other in kept[1:]:
            total += other.rows(part)
        sums.append(total)
    return Sampled(sums, exact)


def settled(kept: Contribution, examples: int, *, exact: bool) -> Contribution:
    """Materialise what is cheaper so, and everything where sums are exact."""
    if isinstance(kept, Sampled):
        return Sampled(kept.pieces, exact)
    if exact or (isinstance(kept, Factored) and not kept.ghost):
        return materialised(kept, examples, exact=exact)
    return kept
