"""Training as a plan says, without clip and noise: the mean gradient of the same Poisson batches.

With losses l_i of a batch drawn at rate q, a step moves along

    (1 / (q N)) sum_i grad l_i,

the private step's gradient (docs/maths/dpsgd.md, D1) with an infinite clip and noise of zero; N is
the declared number of units. Optimiser, schedule and average are the plan's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.lock import Lock
from dpsynth.assess.check import ensure_checked
from dpsynth.assess.nonprivate.room import Place, save_model
from dpsynth.console import progress
from dpsynth.errors import UsageError
from dpsynth.models.frozen.machine import machine
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.models.seeding import generator
from dpsynth.models.threads import one_thread
from dpsynth.models.wavelet.adapt import merge
from dpsynth.models.wavelet.autoregressive import Autoregressive
from dpsynth.planning.training import Train
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.encoding import private_stream
from dpsynth.private.engine import Losses
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, append_log
from dpsynth.private.task import Task
from dpsynth.private.training_state import TrainingState

PHYSICAL = 256
"""Units worked through at once; of a frozen prior, images that the machine takes at once."""


def trained(
    verified: VerifiedPlan, task: Task, settings: Train, place: Place, recipe: str
) -> nn.Module:
    """Train the plan's task without clip and noise, and keep the model in the curator's room.

    The records are checked first unless the run's own charges came before. LoRA factors are merged.

    Raises:
        DataError: the records do not fit the plan.
    """
    ensure_checked(verified)
    with progress("reading records"):
        data = task.take(private_stream(verified, task.space))
    model = learn(task, data, settings, verified.lock, place=place, recipe=recipe)
    if isinstance(model, Autoregressive):
        model = merge(model)
    save_model(model, place, recipe)
    place.drop_checkpoints()
    return model.eval()


def learn(
    task: Task, data: PrivateCodes, settings: Train, lock: Lock, *, place: Place, recipe: str
) -> nn.Module:
    """Train on `data`, which the task took, as long as the plan says; the averaged model.

    Goes on after the last whole chunk of steps of the same recipe. Losses and batch sizes by step
    go to the curator's log.
    """
    state, path = TrainingState(task.model, settings, noise=0.0), place.checkpoint(recipe)
    place.drop_checkpoints(kept=path)
    if not _resumed(state, path):
        place.log.unlink(missing_ok=True)
    with progress("non-private training", settings.steps, completed=state.step) as bar:
        while state.step < settings.steps:
            stop = min(settings.steps, state.step + settings.chunk)
            noise = NoiseSource.for_run(lock, f"reference-{place.kind}-{state.step}")
            log = _chunk(task, data, settings, state, stop=stop, noise=noise, advance=bar.advance)
            append_log(place.log, log)
            state.save(path)
    return state.averaged()


def _resumed(state: TrainingState, path: Path) -> bool:
    """Load the state that an earlier process left, if there is one to be read."""
    if not path.is_file():
        return False
    try:
        state.load(path)
    except UsageError:
        return False
    return True


@one_thread()
def _chunk(
    task: Task,
    data: PrivateCodes,
    settings: Train,
    state: TrainingState,
    *,
    stop: int,
    noise: NoiseSource,
    advance: Callable[[], None],
) -> list[dict[str, Any]]:
    source, log = generator(noise.torch_seed()), list[dict[str, Any]]()
    divisor = settings.rate * task.work.capacity
    while state.step < stop:
        batch = task.work.batch(
            data, rate=settings.rate, step=state.step, noise=noise, source=source
        )
        gradients, losses = mean_gradient(state.model, task.losses, batch, divisor)
        state.apply(gradients)
        mean = float(losses.double().mean()) if len(losses) else None
        log.append({"step": state.step, "batch": len(batch[0]), "used": len(losses), "loss": mean})
        advance()
    return log


def mean_gradient(
    model: nn.Module, losses: Losses, batch: tuple[Tensor, ...], divisor: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Sum of the units' gradients over `divisor`, by name, and the losses (b,) that count.

    A unit whose loss or gradient is not finite contributes nothing, as in private training.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total, seen = [torch.zeros_like(p) for p in named.values()], [torch.zeros(0)]
    size = machine().batch if isinstance(model, FrozenVelocity) else PHYSICAL
    for start in range(0, len(batch[0]), size):
        part = tuple(x[start : start + size] for x in batch)
        seen += _add(total, model, losses, part, list(named.values()))
    return dict(zip(named, (one / divisor for one in total), strict=True)), torch.cat(seen)


def _add(
    total: list[Tensor],
    model: nn.Module,
    losses: Losses,
    part: tuple[Tensor, ...],
    weights: list[nn.Parameter],
) -> list[Tensor]:
    """Add these units' gradients to `total`; their losses. By halves where some are not finite."""
    values = losses(model, *part)
    found = torch.autograd.grad(values.sum(), weights, allow_unused=True)
    finite = all(one is None or bool(one.isfinite().all()) for one in found)
    if finite and bool(values.isfinite().all()):
        for whole, one in zip(total, found, strict=True):
            if one is not None:
                whole.add_(one)
        return [values.detach()]
    half = len(values) // 2
    if not half:
        return []
    sides = tuple(x[:half] for x in part), tuple(x[half:] for x in part)
    return [one for side in sides for one in _add(total, model, losses, side, weights)]
