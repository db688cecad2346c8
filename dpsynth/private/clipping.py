"""Per-example clipping behind one small interface (here through Opacus's hooks).

One record moves the sum by at most C, whatever the number of noise draws: the loss of an
example is averaged over its draws before the clip. Bounds in docs/maths/dpsgd.md.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from dpsynth.errors import UsageError

Losses = Callable[..., Tensor]
"""losses(module, *batch) -> (B,): one loss an example, averaged over the example's draws."""

MARGIN = 2.0**-10
"""Contributions are clipped to C (1 - MARGIN): room for rounding, so that C is never passed."""
GRID = 2.0**-30
"""Sums are rounded to multiples of C * GRID before the noise (for up to 2^30 weights)."""
SMALLEST_CLIP = 1e-12
"""Far above what squares in float32 lose to underflow."""
_BLOCK = 1024
_FLOATS = 2**23
_MOST = 256


@dataclass(frozen=True)
class ClippedSum:
    """What one batch gives before noise: never released as it is.

    gradients: name -> float64 sum of clipped per-example gradients, on the grid.
    norms (B,) float64 and losses (B,) by example: for the curator's room alone.
    """

    gradients: dict[str, Tensor]
    norms: Tensor
    losses: Tensor


class PerExampleClipper:
    """Sums of clipped per-example gradients of `module` under `losses`.

    Use as a context manager, or call `close` to take the hooks off the module again.
    """

    def __init__(
        self, module: nn.Module, losses: Losses, clip: float, *, physical: int | None = None
    ) -> None:
        """Take the clip norm C >= 1e-12; `physical` examples at once (speed and memory alone).

        Raises:
            UsageError: a clip that is too small or not finite, a physical batch below 1, or more
                weights than the rounding bound covers.
        """
        weights = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if not SMALLEST_CLIP <= clip < float("inf") or (physical is not None and physical < 1):
            raise UsageError(f"clipping got clip {clip} and physical batch {physical}")
        if not 0 < weights <= GRID**-1:
            raise UsageError(f"clipping got a module with {weights} trainable weights")
        self.clip = clip
        self.physical = physical or max(1, min(_MOST, _FLOATS // weights))
        self._losses = losses
        self._hooked = GradSampleModule(module, loss_reduction="sum", strict=False)
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]

    def clipped_sum(self, *batch: Tensor) -> ClippedSum:
        """Clipped sum over a batch of tensors (B, ...); zeros for B = 0.

        An example with a gradient that is not finite counts as zero.
        """
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self._named}
        norms, losses = [], []
        for part in _parts(batch, self.physical):
            value, norm = self._add(total, part)
            losses.append(value)
            norms.append(norm)
        step = self.clip * GRID
        for gradient in total.values():
            gradient.div_(step).round_().mul_(step)
        return ClippedSum(total, _joined(norms), _joined(losses))

    def _add(self, total: dict[str, Tensor], part: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        self._hooked.train()  # the hooks are silent in eval mode
        losses = self._losses(self._hooked, *part)
        if losses.shape != part[0].shape[:1]:
            raise UsageError(f"losses have shape {tuple(losses.shape)}, expected one an example")
        with warnings.catch_warnings():
            # Codes and labels need no gradient, which is what torch remarks on here.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            losses.sum().backward()  # type: ignore[no-untyped-call]
        samples = {name: g for name, p in self._named if (g := _take(p)) is not None}
        squares = losses.new_zeros(losses.shape, dtype=torch.float64)
        for sample in samples.values():
            squares += _squared_norms(sample.flatten(1))
        norms = squares.sqrt()
        bound = self.clip * (1 - MARGIN)
        finite = norms.isfinite()
        factors = bound / norms.clamp(min=bound)
        every = bool(finite.all())
        for name, sample in samples.items():
            # Selected, not multiplied by zero: 0 * inf is no number.
            kept = sample if every else sample[finite]
            # In float64, so that no record's share is rounded by another record's company.
            scaled = factors[finite] @ kept.flatten(1).double()
            total[name] += scaled.view(sample.shape[1:])
        return losses.detach(), norms

    def close(self) -> None:
        """Take the hooks off."""
        self._hooked.remove_hooks()
        for _, parameter in self._named:
            _take(parameter)
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def __enter__(self) -> "PerExampleClipper":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _squared_norms(sample: Tensor) -> Tensor:
    """Squared norms (B,) of rows (B, P): float32 within blocks of 1024, float64 across them.

    Relative error below 1024 * 2^-24, a sixteenth of MARGIN, whatever P is.
    """
    whole = sample.shape[1] // _BLOCK * _BLOCK
    rest: Tensor = torch.linalg.vector_norm(sample[:, whole:], dim=1).double().square()
    if whole == 0:
        return rest
    view = sample[:, :whole].unfold(1, _BLOCK, _BLOCK)  # (B, P / 1024, 1024), not a copy
    blocks: Tensor = torch.linalg.vector_norm(view, dim=2)
    return rest + blocks.double().square().sum(dim=1)


def _take(parameter: nn.Parameter) -> Tensor | None:
    """The per-example gradient (B, ...) of the last backward pass, cleared with the plain one."""
    sample: Tensor | None = getattr(parameter, "grad_sample", None)
    if sample is not None:
        parameter.grad_sample = None  # type: ignore[attr-defined]
    parameter.grad = None
    return sample


def _parts(batch: tuple[Tensor, ...], physical: int) -> Iterator[tuple[Tensor, ...]]:
    """Physical batches, the last as short as it comes; none for an empty batch."""
    for start in range(0, len(batch[0]), physical):
        yield tuple(x[start : start + physical] for x in batch)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)
