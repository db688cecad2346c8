"""A DP-LoRA step (clip, sum, noise) over the same step without privacy, in one process.

Both take the same physical batch through the same frozen transformer at the size of the small
prior, with its 264 prompt tokens, and train the same factors. What inputs hold decides no time:
they are random. Steps take turns, and turns change which goes first; the control is one plain step
over another. The first steps, with the engine's rehearsals, are not counted.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine import seconds
from benchmarks.frozen import checkpoint
from benchmarks.frozen.sizes import Size
from benchmarks.frozen.things import CLASSES

MOST = 1.5
TURNS, WARM, BATCH = 7, 8, 16
RANK = 8


def measured(
    size: Size, turns: int = TURNS, batch: int = BATCH, warm: int = WARM
) -> dict[str, float]:
    """Median milliseconds of both, and the median ratios over turns, of wall and CPU time."""
    torch.set_num_threads(1)
    model = adapted(size)
    data = records(size, batch)
    steps = {
        "plain": plain_step(copy.deepcopy(model), data),
        "private": private_step(copy.deepcopy(model), data),
        "control": plain_step(copy.deepcopy(model), data),
    }
    for _ in range(warm):
        for step in steps.values():
            step()
    found = []
    for turn in range(turns):
        order = list(steps) if turn % 2 == 0 else list(reversed(steps))
        found.append({name: seconds(steps[name]) for name in order})

    def over_plain(name: str, clock: int) -> list[float]:
        return sorted(one[name][clock] / one["plain"][clock] for one in found)

    ratios = over_plain("private", 0)
    return {
        "batch": batch,
        "factors": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "weights": sum(p.numel() for p in model.parameters()),
        "plain ms": 1e3 * statistics.median(one["plain"][1] for one in found),
        "private ms": 1e3 * statistics.median(one["private"][1] for one in found),
        "ratio": statistics.median(ratios),
        "asked": MOST,
        "lowest": ratios[0],
        "highest": ratios[-1],
        "cpu ratio": statistics.median(over_plain("private", 1)),
        "control": statistics.median(over_plain("control", 0)),
        "cpu control": statistics.median(over_plain("control", 1)),
    }


def adapted(size: Size) -> Any:
    """A frozen velocity model of that size with LoRA factors, of which B is no longer zero."""
    from dpsynth.models.frozen.adapters import add_factors, start_factors
    from dpsynth.models.frozen.schedule import Schedule
    from dpsynth.models.frozen.velocity import FrozenVelocity
    from dpsynth.models.trainable import train_only
    from dpsynth.planning.optimizer import LowRank

    torch.manual_seed(0)
    transformer = checkpoint.build_transformer(size).eval()
    add_factors(transformer, LowRank(rank=RANK), seed=1)
    rows, text = len(CLASSES) + 1, 2 * checkpoint.TEXT
    embeds = torch.randn(rows, checkpoint.LENGTH + checkpoint.T5, text)
    embeds[:, checkpoint.LENGTH :] = 0
    prompts = {"prompt.embeds": embeds, "prompt.pooled": torch.randn(rows, text)}
    dim = size.latent[0] * size.latent[1] * size.latent[2]
    model = FrozenVelocity(
        transformer, "sd3", size.latent, prompts, torch.zeros(dim), schedule=Schedule()
    ).eval()
    for factor in start_factors(model).values():
        factor.add_(0.1 * torch.randn(factor.shape))
    train_only(model, "lora")
    return model


def records(size: Size, batch: int) -> tuple[torch.Tensor, ...]:
    """Codes, labels, times and noise of a batch, one draw a record."""
    source, dim = torch.Generator().manual_seed(0), size.latent[0] * size.latent[1] * size.latent[2]
    return (
        torch.randn(batch, dim, generator=source),
        torch.randint(len(CLASSES) + 1, (batch,), generator=source),
        torch.rand((batch, 1), generator=source),
        torch.randn((batch, 1, dim), generator=source),
    )


def plain_step(model: Any, data: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Forward, backward and AdamW on the factors."""
    from dpsynth.private.steps import flow_losses

    factors = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(factors, lr=1e-4)

    def step() -> None:
        flow_losses(model, *data).mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def private_step(model: Any, data: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Clipped sum, noise on the sum, and AdamW, in the same physical batch."""
    from dpsynth.private.engine import EngineSettings, PerExampleClipper
    from dpsynth.private.noise import NoiseSource
    from dpsynth.private.steps import flow_losses, noisy_mean

    factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimiser, noise = torch.optim.AdamW(factors.values(), lr=1e-4), NoiseSource()
    clipper = PerExampleClipper(
        model, flow_losses, 1.0, settings=EngineSettings(physical=len(data[0]))
    )

    def step() -> None:
        noisy = noisy_mean(clipper.clipped_sum(*data), 1.0, len(data[0]), noise)
        for name, factor in factors.items():
            factor.grad = noisy[name].to(factor.dtype)
        optimiser.step()
        optimiser.zero_grad()

    return step
