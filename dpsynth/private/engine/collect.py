"""From output gradients, as they arrive, to one contribution for each parameter."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.private.engine.contributions import (
    Contribution,
    Factored,
    Sampled,
    Scratch,
    joined,
    pieces,
    settled,
)
from dpsynth.private.engine.rounding import Squares, added
from dpsynth.private.engine.tape import Tape, Tracked

Named = list[tuple[str, nn.Parameter]]


Kept = dict[tuple[str, ...], Contribution]
"""names of parameters -> their per-example gradients."""


def add_weighted(total: dict[str, Tensor], kept: Kept, factors: Tensor) -> None:
    """Add the sum over examples of factor times gradient to `total`; empties `kept` on the way.

    The last to arrive come first: they may still be in the cache.
    """
    scratch = Scratch()
    for labels in reversed(list(kept)):
        flat = [total[name].view(-1) for name in labels]
        kept.pop(labels).add_weighted(flat, factors, scratch)


@dataclass
class Collector:
    """Works through each output gradient when it arrives: norms at once, uses added by example."""

    tape: Tape
    named: Named
    exact: bool
    bytes: int = 0
    _kept: Kept = field(default_factory=dict)
    _several: dict[str, list[Contribution]] = field(default_factory=dict)
    _derived: list[tuple[Tracked, Contribution]] = field(default_factory=list)
    _squares: list[Squares] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Count the uses of each parameter; one through a function of it never stands alone."""
        self._uses: dict[str, int] = {}
        for tracked in (one for record in self.tape.records for one in record.tracked):
            for root in tracked.roots:
                self._uses[root] = self._uses.get(root, 0) + (1 if tracked.source.is_leaf else 2)

    def receive(self, number: int, gradient: Tensor) -> None:
        """Take the gradient of the losses' sum by the output of use `number`."""
        record = self.tape.records[number]
        if record.inputs is not None and record.inputs._version != record.version:
            raise UsageError(
                f"{self.tape.layer(record.label)}: its input was changed in place afterwards",
                hint="use x = x + y instead of x += y after the layer",
            )
        self.bytes += gradient.nbytes + (0 if record.inputs is None else record.inputs.nbytes)
        with torch.no_grad():
            for tracked, one in record.given(gradient.detach()):
                self._take(tracked, one)
        record.done()

    def _take(self, tracked: list[Tracked], one: Contribution) -> None:
        alone = all(x.source.is_leaf and self._uses[x.label] == 1 for x in tracked)
        if isinstance(one, Factored) and one.bias and (self.exact or not alone or not one.ghost):
            for single, part in zip(tracked, one.split(), strict=True):
                self._take([single], part)
        elif alone:
            self._settle(tuple(x.label for x in tracked), one)
        elif tracked[0].source.is_leaf:
            self._several.setdefault(tracked[0].label, []).append(one)
        else:
            self._derived.append((tracked[0], one))

    def _settle(self, labels: tuple[str, ...], one: Contribution) -> None:
        kept = settled(one, self.tape.examples, exact=self.exact)
        self._squares.append(kept.squares())
        self._kept[labels] = kept
        if isinstance(kept, Sampled):
            self.bytes += sum(piece.nbytes for piece in kept.pieces)

    def finish(self) -> tuple[Kept, Tensor, Tensor]:
        """Everything kept, the squared norms (B,) float64, and the most they can be short of."""
        for tracked, one in self._derived:
            for label, part in _through(tracked, one, self.named, self.tape.examples).items():
                self._several.setdefault(label, []).append(part)
        with torch.no_grad():
            for name, many in self._several.items():
                self._settle((name,), joined(many, self.tape.examples, exact=self.exact))
        found, short = added(self._squares)
        return self._kept, found, short


def _through(
    tracked: Tracked, one: Contribution, named: Named, examples: int
) -> dict[str, Sampled]:
    """Per-example gradients of the parameters that a tracked tensor is a function of."""
    parameters = [p for _, p in named]
    found: dict[str, list[Tensor]] = {}
    for part in pieces(one.size, examples):
        rows = one.rows(part).view(-1, *tracked.source.shape)
        back = torch.autograd.grad(
            tracked.source,
            parameters,
            rows,
            is_grads_batched=True,
            allow_unused=True,
            retain_graph=True,
        )
        for (name, _), gradient in zip(named, back, strict=True):
            if gradient is not None:
                found.setdefault(name, []).append(gradient.flatten(1))
    return {name: Sampled(many) for name, many in found.items()}
