"""Values that a rehearsal must leave as they were, remembered without a copy of a large model."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_WHOLE = 2**20
"""Numbers of the largest tensor that is copied; of larger ones a keyed sum is kept."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclass
class Remembered:
    """Parameters and buffers as they were: copies of small ones, keyed sums of large ones.

    A sum is over all bits, with multipliers that nobody knows before: a changed tensor has the same
    one with a chance of at most 2^-32. So a frozen model of billions of weights is watched at no
    more memory than a block of `_WHOLE` numbers.
    """

    tensors: Iterable[Tensor]
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the values of now."""
        self._source = torch.Generator().manual_seed(secrets.randbits(63))
        self._keys: dict[torch.device, Tensor] = {}
        self._seed = secrets.randbits(63)
        for x in self.tensors:
            if x.numel() <= _WHOLE:
                self._copies.append((x, x.detach().clone()))
            else:
                self._sums.append((x, self._sum(x)))

    def hold(self) -> bool:
        """Whether all values are the same still."""
        whole = all(torch.equal(x.detach().nan_to_num(), v.nan_to_num()) for x, v in self._copies)
        return whole and all(torch.equal(self._sum(x), found) for x, found in self._sums)

    def _sum(self, x: Tensor) -> Tensor:
        """Sum of the tensor's words, each times its place's own odd number, modulo 2^64."""
        flat = x.detach()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        words = flat.contiguous().view(-1).view(_WORDS[flat.element_size()])
        keys, blocks = self._odd(x.device), -(-len(words) // _WHOLE)
        own = _odd(blocks, torch.Generator().manual_seed(self._seed)).to(x.device)
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for number, block in enumerate(torch.split(words, _WHOLE)):
            total += own[number] * (block.long() * keys[: len(block)]).sum()
        return total

    def _odd(self, device: torch.device) -> Tensor:
        if device not in self._keys:
            self._keys[device] = _odd(_WHOLE, self._source).to(device)
        return self._keys[device]


def _odd(count: int, source: torch.Generator) -> Tensor:
    """Odd numbers of 64 bits."""
    return torch.randint(-(2**62), 2**62, (count,), generator=source) * 2 + 1
