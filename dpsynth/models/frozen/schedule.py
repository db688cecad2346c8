"""The noise levels that a frozen model is integrated through, as times of dpsynth: t = 1 - sigma.

A flow-matching scheduler goes from s = 1 evenly down to its least s, and shifts each towards the
noisy end (Esser et al. 2024, equation 23): sigma = a s / (1 + (a - 1) s).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpsynth.errors import UsageError
from dpsynth.models.flow import require_steps

_OTHER = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "shift_terminal",
    "stochastic_sampling",
)
"""Settings under which diffusers' scheduler has other levels, or draws noise."""
_NEAR = 1e-7  # of two times that are one


@dataclass(frozen=True)
class Schedule:
    """shift: a of the formula above. least: the last s above 0; None is 1 over the steps."""

    shift: float = 1.0
    least: float | None = None

    def times(self, steps: int, start_time: float = 0.0) -> list[float]:
        """See `euler_times`."""
        return euler_times(steps, self.shift, start_time, least=self.least)


def euler_times(
    steps: int, shift: float, start_time: float = 0.0, *, least: float | None = None
) -> list[float]:
    """Times from `start_time` to 1 that Euler steps go through: the scheduler's own of `steps`.

    Later starts keep the scheduler's levels below theirs, and so have fewer steps.

    >>> [round(1 - t, 3) for t in euler_times(4, 3.0)]
    [1.0, 0.9, 0.75, 0.5, 0.0]
    >>> [round(1 - t, 3) for t in euler_times(4, 3.0, 0.05)]
    [0.95, 0.9, 0.75, 0.5, 0.0]

    Raises:
        UsageError: fewer than one step, or a start outside [0, 1).
    """
    require_steps(steps, start_time)
    last = 1.0 / steps if least is None else least
    own = []
    for step in range(steps):
        s = 1.0 + (last - 1.0) * step / max(1, steps - 1)
        own.append(1.0 - shift * s / (1.0 + (shift - 1.0) * s))
    return [start_time, *(t for t in own if t > start_time + _NEAR), 1.0]


def schedule_of(config: Mapping[str, Any], tokens: int, *, even: bool) -> Schedule:
    """The schedule of a scheduler's configuration, for images of so many tokens.

    even: the pipeline hands the scheduler even levels down to 1 / steps, as Flux's does.

    Raises:
        UsageError: another scheduler than FlowMatchEulerDiscreteScheduler, or settings of it that
            are not supported.
    """
    name = config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
    wrong = [key for key in _OTHER if config.get(key)]
    if name != "FlowMatchEulerDiscreteScheduler" or wrong:
        raise UsageError(
            f"the checkpoint's scheduler is {name}{' with ' + ', '.join(wrong) if wrong else ''}; "
            "expected FlowMatchEulerDiscreteScheduler with plain shifted levels",
            hint="change scheduler/scheduler_config.json of a copy of the checkpoint",
        )
    shift, dynamic = float(config.get("shift", 1.0)), bool(config.get("use_dynamic_shifting"))
    least = 1.0 / int(config.get("num_train_timesteps", 1000))
    if not dynamic:
        # diffusers shifts the least level twice: once when it is built, once with all others.
        least = shift * least / (1.0 + (shift - 1.0) * least)
    else:
        shift = _dynamic(config, tokens)
    return Schedule(shift, None if even else least)


def _dynamic(config: Mapping[str, Any], tokens: int) -> float:
    """The shift for images of so many tokens: linear in their number, then exponential or not."""
    low, high = (
        int(config.get("base_image_seq_len", 256)),
        int(config.get("max_image_seq_len", 4096)),
    )
    base, most = float(config.get("base_shift", 0.5)), float(config.get("max_shift", 1.15))
    mu = base + (most - base) * (tokens - low) / (high - low)
    return math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else mu
