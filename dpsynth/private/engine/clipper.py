"""Sums of clipped per-example gradients: one backward pass, norms, factors, one product a layer.

One record moves the sum by at most C, whatever the number of noise draws: the loss of an
example is averaged over its draws before the clip. Bounds in docs/maths/dpsgd.md (D2).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.private.engine import isolation
from dpsynth.private.engine.collect import Collector, Kept, add_weighted
from dpsynth.private.engine.rehearsal import Rehearsal
from dpsynth.private.engine.rules import RULES
from dpsynth.private.engine.settings import DEFAULT, EngineSettings, affordable
from dpsynth.private.engine.tape import Tape, refuse_gradient

Losses = Callable[..., Tensor]
"""losses(module, *batch) -> (B,): one loss an example, averaged over the example's draws."""

MARGIN = 2.0**-10
"""Contributions are clipped to C (1 - MARGIN): room for rounding, so that C is never passed."""
GRID = 2.0**-30
"""Sums are rounded to multiples of C * GRID before the noise (for up to 2^30 weights)."""
SMALLEST_CLIP = 1e-12
"""Far above what squares in float32 lose to underflow."""
_PILOT = 16
_CACHED = 2**15


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

    Use as a context manager, or call `close`; the module is changed inside `clipped_sum` alone,
    and its layers stay in train or eval mode as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        losses: Losses,
        clip: float,
        *,
        settings: EngineSettings = DEFAULT,
    ) -> None:
        """Take the clip norm C >= 1e-12.

        Raises:
            UsageError: a clip that is too small or not finite, more weights than the rounding
                bound covers, or a layer that mixes examples.
        """
        self.settings = settings
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        weights = sum(p.numel() for _, p in self._named)
        self.set_clip(clip)
        if not 0 < weights <= GRID**-1:
            raise UsageError(f"clipping got a module with {weights} trainable weights")
        isolation.check_layers(module)
        self.physical = settings.physical
        self._module, self._losses = module, losses
        self._tape = Tape(module, RULES)
        self._rehearsal = Rehearsal(module, losses, self._named)

    def set_clip(self, clip: float) -> None:
        """Clip to norm C from the next sum on. UsageError as at the start."""
        if not SMALLEST_CLIP <= clip < float("inf"):
            raise UsageError(f"clipping got clip {clip}, expected a number from {SMALLEST_CLIP}")
        self.clip = clip

    def clipped_sum(self, *batch: Tensor) -> ClippedSum:
        """Clipped sum over a batch of tensors (B, ...); zeros for B = 0.

        An example with a gradient that is not finite counts as zero.

        Raises:
            UsageError: the module uses a parameter in a way that the engine does not know, mixes
                examples, writes into its buffers or parameters, has other parameters than before
                or is in use; the losses are not one an example.
        """
        isolation.check_parameters(self._module, self._named)
        isolation.check_lengths(batch)
        device = self._named[0][1].device
        with isolation.alone(self._module), isolation.full_precision(device):
            return self._sum(batch, device)

    def _sum(self, batch: tuple[Tensor, ...], device: torch.device) -> ClippedSum:
        """Work through the physical batches; their sums add up in float64."""
        flat = torch.zeros(
            sum(p.numel() for _, p in self._named), dtype=torch.float64, device=device
        )
        total, end = {}, 0
        for name, parameter in self._named:
            end += parameter.numel()
            total[name] = flat[end - parameter.numel() : end].view(parameter.shape)
        norms, losses = [], []
        start, count = 0, len(batch[0])
        while start < count:
            stop = min(count, start + (self.physical or _PILOT))
            value, norm = self._add(total, tuple(x[start:stop].to(device) for x in batch))
            losses.append(value)
            norms.append(norm)
            start = stop
        step = self.clip * GRID
        for some in torch.split(flat, _CACHED):  # piece by piece, so that they stay in the cache
            some.div_(step).round_().mul_(step)
        return ClippedSum(total, _joined(norms), _joined(losses))

    def _add(self, total: dict[str, Tensor], part: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Add one physical batch; losses and norms (b,)."""
        tape, before = self._tape, isolation.versions(self._module)
        try:
            with tape.watch(len(part[0])):
                losses = self._forward(part)
                form = tape.signature()
                isolation.check_paths(losses, tape, self._named)
                some = bool(tape.records) and losses.requires_grad
                if some:
                    kept, squares, short = self._backward(losses)
        finally:
            tape.records, tape.receive = [], refuse_gradient  # nothing of the examples stays
        isolation.check_written(self._module, before)
        found = losses.detach()
        norms = self._weigh(total, kept, squares, short) if some else found.double() * 0
        self._rehearsal.after(form, part)
        return found, norms

    def _weigh(
        self, total: dict[str, Tensor], kept: Kept, squares: Tensor, short: Tensor
    ) -> Tensor:
        """Add the clipped gradients to `total`; norms (b,)."""
        bound = self.clip * (1 - MARGIN)
        # Clipped by the most that the norm can be: a ghost norm may be rounded down.
        most = (squares + short).clamp(min=0).sqrt()
        finite = most.isfinite()
        factors = bound / most.clamp(min=bound)
        # A factor that float32 rounds to a subnormal number may be far above the one meant.
        factors = torch.where(factors < torch.finfo(torch.float32).tiny, 0.0, factors)
        if not bool(finite.all()):
            # Selected, not multiplied by zero: 0 * inf is no number.
            chosen = finite.nonzero().squeeze(1)
            factors = factors[chosen]
            kept = {labels: one.take(chosen) for labels, one in kept.items()}
        add_weighted(total, kept, factors)
        return torch.where(finite, squares.clamp(min=0).sqrt(), most)

    def _forward(self, part: tuple[Tensor, ...]) -> Tensor:
        """Losses (b,) with the uses of parameters on the tape."""
        with self._precision(part[0].device):
            losses = self._losses(self._module, *part)
        if losses.shape != part[0].shape[:1]:
            raise UsageError(f"losses have shape {tuple(losses.shape)}, expected one an example")
        return losses

    def _backward(self, losses: Tensor) -> tuple[Kept, Tensor, Tensor]:
        """Per-example gradients of all parameters, squared norms (b,), what these are short of."""
        tape, uses = self._tape, len(self._tape.records)
        collector = Collector(tape, self._named, exact=self.settings.exact_sums)
        tape.receive = collector.receive
        torch.autograd.backward(losses, torch.ones_like(losses))
        if len(tape.records) != uses:
            raise UsageError(
                "the module ran layers again during the backward pass",
                hint="turn gradient checkpointing off: the engine keeps activations itself",
            )
        found = collector.finish()
        if self.physical is None:
            self.physical = affordable(collector.bytes // len(losses), losses.device)
        return found

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def close(self) -> None:
        """Nothing of the engine stays on the module between calls; kept for its users."""
        self._tape.records = []

    def __enter__(self) -> "PerExampleClipper":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)
