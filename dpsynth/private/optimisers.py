"""Optimisers on the privatised gradient, and the learning rate by step.

All of it is post-processing: it reads noisy gradients, the plan and the noise's declared
variance. Formulas in docs/maths/dpsgd.md (D6, D7).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.planning.optimizer import Sgd
from dpsynth.planning.training import Train

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_NOISE = 1e18
"""Of bias correction: its square still fits into float32."""


def learning_rate(settings: Train, step: int) -> float:
    """Learning rate of step `step`, counted from 0 (D6).

    >>> from dpsynth.planning.optimizer import Schedule
    >>> schedule = Schedule(kind="linear", warmup=2)
    >>> settings = Train(rate=0.1, steps=6, learning_rate=0.8, schedule=schedule)
    >>> [round(learning_rate(settings, step), 3) for step in range(6)]
    [0.4, 0.8, 0.8, 0.6, 0.4, 0.2]
    """
    peak, schedule = settings.learning_rate, settings.schedule
    if step < schedule.warmup:
        return peak * ((step + 1) / schedule.warmup)
    if schedule.kind == "constant":
        return peak
    done = min(1.0, (step - schedule.warmup) / (settings.steps - schedule.warmup))
    return peak * ((1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done)


def gradient_noise(slots: Sequence[Slot], capacity: int) -> float:
    """Standard deviation of the noise on a mean gradient: noise_std / (q N), from the lock alone.

    Raises PlanError unless all training slots have the same one.
    """
    kinds = {(slot.noise_std, slot.rate) for slot in slots}
    if len(kinds) != 1:
        raise PlanError("the lock's training slots differ in noise or rate, expected one of each")
    std, rate = kinds.pop()
    if rate is None:
        raise PlanError("the lock's training slots have no sampling rate")
    return std / (rate * capacity)


def build_optimiser(
    parameters: Iterable[nn.Parameter], settings: Train, noise: float
) -> torch.optim.Optimizer:
    """The plan's optimiser; `noise` is the standard deviation of an entry's noise.

    Raises UsageError for noise that is negative or not finite.
    """
    chosen, rate = settings.optimizer, learning_rate(settings, 0)
    if isinstance(chosen, Sgd):
        return torch.optim.SGD(parameters, lr=rate, momentum=chosen.momentum)
    betas = (chosen.beta1, chosen.beta2)
    decay = 0.0 if chosen.kind == "adam" else chosen.weight_decay
    if chosen.bias_correction:
        floor = chosen.floor
        return AdamBC(parameters, rate, betas, chosen.eps, decay, noise=noise, floor=floor)
    if chosen.kind == "adam":
        return torch.optim.Adam(parameters, lr=rate, betas=betas, eps=chosen.eps)
    return torch.optim.AdamW(parameters, lr=rate, betas=betas, eps=chosen.eps, weight_decay=decay)


def state_names(settings: Train) -> tuple[str, ...]:
    """Names of the tensors, each of its weight's shape, that the optimiser keeps of the past."""
    if isinstance(settings.optimizer, Sgd):
        return ("momentum_buffer",) if settings.optimizer.momentum else ()
    return MOMENTS


class AdamBC(torch.optim.Optimizer):
    """Adam without the noise's share of its second moment (DP-AdamBC; D7).

    With m-hat and v-hat as in Adam, a weight moves by

        -lr m-hat / (sqrt(max(v-hat - noise^2, floor noise^2)) + eps),

    after decoupled decay by 1 - lr weight_decay (Tang, Shpilevskiy and Lecuyer 2024, algorithm 1;
    its gamma' is floor noise^2, its eps zero). noise = 0 gives Adam and AdamW.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        noise: float,
        floor: float,
    ) -> None:
        """Take the standard deviation `noise` of the gradient's noise, at most `MOST_NOISE`.

        Raises UsageError for another one.
        """
        if not 0 <= noise <= MOST_NOISE:
            raise UsageError(f"bias correction got noise {noise}, expected 0 to {MOST_NOISE:g}")
        super().__init__(
            parameters,
            {"lr": rate, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self._variance, self._least = noise**2, floor * noise**2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every weight along its gradient."""
        if closure is not None:
            raise UsageError("a private gradient can't be asked for again: step takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros_like(weight)
        state["step"] += 1
        count, (beta1, beta2), rate = state["step"].item(), group["betas"], group["lr"]
        first, second = (state[name] for name in MOMENTS)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        signal = (second / (1 - beta2**count)).sub_(self._variance).clamp_(min=self._least)
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(first, signal.sqrt_().add_(group["eps"]), value=-rate / (1 - beta1**count))
