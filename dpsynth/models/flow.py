"""Rectified flow on codes: the regression loss and the Euler sampler with guidance.

StraightDP section 2, equation 1: x_t = (1 - t) xi + t z runs from noise (t = 0) to code (t = 1).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dpsynth.errors import UsageError

VelocityField = Callable[[Tensor, Tensor, Tensor], Tensor]
"""v(x (B, d), t (B,), y (B,)) -> (B, d); label `classes` is the null label."""


@runtime_checkable
class Scheduled(Protocol):
    """A velocity field with times of its own: `euler` goes through them, in no equal steps."""

    def euler_times(self, steps: int, start_time: float = 0.0) -> list[float]:
        """Times from `start_time` to 1; `steps` count from time 0, later starts have fewer."""
        ...


def interpolate(codes: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) xi + t z of codes and noise (..., d) at times t (...)."""
    return (1 - t)[..., None] * noise + t[..., None] * codes


def drop_labels(
    labels: Tensor, rate: float, null: int, generator: torch.Generator | None = None
) -> Tensor:
    """Labels (B,) with each replaced by the null label with probability `rate`."""
    coins = torch.rand(labels.shape, generator=generator, device=labels.device)
    return torch.where(coins < rate, torch.full_like(labels, null), labels)


def flow_loss(
    velocity: VelocityField,
    codes: Tensor,
    labels: Tensor,
    *,
    generator: torch.Generator | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Mean over examples of ||v(x_t, t, y) - (z - xi)||^2 / d for t uniform on [low, high).

    Equation 1, divided by d. Codes (B, d), labels (B,) with dropped ones already null.
    """
    noise = torch.randn(codes.shape, generator=generator, dtype=codes.dtype, device=codes.device)
    coins = torch.rand(codes.shape[:1], generator=generator, dtype=codes.dtype, device=codes.device)
    t = low + (high - low) * coins
    predicted = velocity(interpolate(codes, noise, t), t, labels)
    return (predicted - (codes - noise)).square().mean()


def guided(
    velocity: VelocityField, x: Tensor, t: Tensor, labels: Tensor, *, null: int, guidance: float
) -> Tensor:
    """Classifier-free guidance: v_null + g (v_cond - v_null), (B, d); one call when g is 1."""
    if guidance == 1.0:
        return velocity(x, t, labels)
    if guidance == 0.0:
        return velocity(x, t, torch.full_like(labels, null))
    # Both branches in one batch: half the calls, the same arithmetic for each row.
    both = velocity(
        torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, torch.full_like(labels, null)])
    )
    conditional, unconditional = both.chunk(2)
    return unconditional + guidance * (conditional - unconditional)


@torch.no_grad()
def euler(
    velocity: VelocityField,
    start: Tensor,
    labels: Tensor,
    *,
    null: int,
    steps: int,
    guidance: float = 1.0,
    start_time: float = 0.0,
) -> Tensor:
    """Integrate dx/dt = v from `start_time` to 1 by Euler steps: codes (B, d).

    Equal steps, or those of the field's own schedule (`Scheduled`). `start` (B, d) are points x at
    that time: noise at t = 0; later, draws of the tilted marginal (StraightDP section 3.1,
    "Sampling-time guidance").

    Raises:
        UsageError: fewer than one step, or a start outside [0, 1).
    """
    require_steps(steps, start_time)
    x, span = start, 1.0 - start_time
    times = list[float]()
    if isinstance(velocity, Scheduled):
        times = velocity.euler_times(steps, start_time)
    for now, then in pairwise(times):
        t = torch.full(x.shape[:1], now, dtype=x.dtype, device=x.device)
        x = x + (then - now) * guided(velocity, x, t, labels, null=null, guidance=guidance)
    for step in range(0 if times else steps):
        now = start_time + span * step / steps
        t = torch.full(x.shape[:1], now, dtype=x.dtype, device=x.device)
        x = x + span * guided(velocity, x, t, labels, null=null, guidance=guidance) / steps
    return x


def steps_from(velocity: VelocityField, steps: int, start_time: float) -> int:
    """The `steps` to give `euler` so that a start at that time has its share of so many steps.

    A schedule of the field's own takes its share by itself.
    """
    if isinstance(velocity, Scheduled):
        return steps
    return max(1, math.ceil(steps * (1.0 - start_time)))


def require_steps(steps: int, start_time: float) -> None:
    """Raise UsageError for fewer than one step, or a start outside [0, 1)."""
    if steps < 1:
        raise UsageError(f"the Euler sampler got {steps} steps; expected at least 1")
    if not 0.0 <= start_time < 1.0:
        raise UsageError(f"the Euler sampler got the start time {start_time!r}, expected [0, 1)")
