"""Training of the small prior's transformer on public latents, as Stable Diffusion 3 is trained.

Rectified flow: x = (1 - sigma) z + sigma xi, the model predicts xi - z at timestep 1000 sigma.
Noise levels are logit-normal, then moved by the scheduler's shift (Esser et al. 2024, 3.1 and
5.3.2); a tenth of the prompts is dropped. What is saved is the average over the last steps.
"""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.frozen import autoencoder, checkpoint, things
from benchmarks.frozen.sizes import Size

RATE = 1e-3
DROPPED = 0.1
AVERAGE = 0.99


class Known(NamedTuple):
    """Latents (n, C, h, w), labels (n,), and embeddings of the prompts, the empty one last."""

    codes: Tensor
    labels: Tensor
    embeds: Tensor
    pooled: Tensor


def train(folder: Path, size: Size) -> Path:
    """The whole checkpoint in `folder`, made where it is missing; training goes on where it was."""
    if (folder / "model_index.json").exists():
        return folder
    vae = autoencoder.train(folder.with_name(f"{folder.name}-vae"), size)
    model = checkpoint.build_transformer(size)
    draft = folder.with_name(f"{folder.name}-draft")
    checkpoint.write(draft, model, vae)  # for its text encoders alone
    known = Known(
        *public_latents(folder.with_name(f"{folder.name}-latents.pt"), vae, size),
        *checkpoint.prompts(draft),
    )
    fitted = fit(model, known, size, folder.with_name("state.pt"))
    return checkpoint.write(folder, fitted, vae)


def public_latents(path: Path, vae: Any, size: Size) -> tuple[Tensor, Tensor]:
    """Latents (n, C, h, w) of dyed public clothes and their labels (n,), encoded once."""
    if not path.exists():
        grey, labels = things.clothes("train", slice(0, size.clothes))
        images = things.dyed(grey, things.STYLES["any"], seed=2, side=size.side)
        torch.save((autoencoder.latents(vae, images), torch.from_numpy(labels.copy())), path)
    found: tuple[Tensor, Tensor] = torch.load(path, weights_only=True)
    return found


def fit(model: Any, known: Known, size: Size, state: Path) -> Any:
    """Train the transformer; every 100 steps all that is needed to go on is kept in `state`."""
    average = copy.deepcopy(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, RATE, total_steps=size.steps, pct_start=0.1
    )
    parts = {"model": model, "average": average, "optimiser": optimiser, "decay": decay}
    first = resumed(state, parts)
    start, losses = time.process_time(), list[float]()
    for step in range(first, size.steps):
        torch.manual_seed(step)
        rows = torch.randint(len(known.codes), (size.batch,))
        with one_for_all():
            loss = flow_loss(model, known, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        decay.step()
        follow(average, model, min(AVERAGE, (step + 1) / (step + 10)))
        losses.append(float(loss.detach()))
        if (step + 1) % 100 == 0:
            kept = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step + 1, **kept}, state.with_suffix(".part"))
            state.with_suffix(".part").rename(state)
            mean, spent = sum(losses[-100:]) / len(losses[-100:]), time.process_time() - start
            print(f"transformer {step + 1}: {mean:.4f}, {spent:.0f} s", flush=True)
    return average


def flow_loss(model: Any, known: Known, rows: Tensor) -> Tensor:
    """Mean squared error of the predicted xi - z, over a batch of these rows (B,)."""
    codes, labels = known.codes[rows], known.labels[rows]
    empty = torch.full_like(labels, len(known.pooled) - 1)
    asked = torch.where(torch.rand(labels.shape) < DROPPED, empty, labels)
    level = torch.sigmoid(torch.randn(len(codes)))
    level = checkpoint.SHIFT * level / (1 + (checkpoint.SHIFT - 1) * level)
    noise, sigma = torch.randn_like(codes), level[:, None, None, None]
    found = model(
        hidden_states=(1 - sigma) * codes + sigma * noise,
        timestep=1000 * level,
        encoder_hidden_states=known.embeds[asked, : 1 - checkpoint.T5],
        pooled_projections=known.pooled[asked],
    ).sample
    loss: Tensor = (found - (noise - codes)).square().mean()
    return loss


@contextmanager
def one_for_all() -> Iterator[None]:
    """Inside, the last token of the prompt counts as `T5` equal ones in every attention.

    Those in T5's place are all zero and have no position, and so stay alike through all layers:
    attention to one of them, its logit raised by log(256), is attention to all of them. A quarter
    of the tokens give the same output.
    """
    plain = functional.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        weight = torch.zeros(1, 1, 1, key.shape[2])
        weight[..., -1] = math.log(checkpoint.T5)
        found: Tensor = plain(query, key, value, attn_mask=weight.expand(1, 1, query.shape[2], -1))
        return found

    with patch.object(functional, "scaled_dot_product_attention", counted):
        yield


@contextmanager
def few_tokens() -> Iterator[None]:
    """Inside, dpsynth's calls of such a transformer take `one_for_all` where T5's tokens are zero.

    Speed alone, a quarter of the time: the outputs are the same but for rounding.
    """
    from dpsynth.models.frozen.families import EMBEDS, Prompts, StableDiffusion3

    whole = StableDiffusion3.predict

    def few(own: Any, transformer: Any, x: Tensor, sigma: Tensor, prompts: Prompts) -> Tensor:
        embeds = prompts[EMBEDS]
        if embeds.shape[1] <= checkpoint.T5 or embeds[:, -checkpoint.T5 :].any():
            return whole(own, transformer, x, sigma, prompts)
        shorter = {**prompts, EMBEDS: embeds[:, : 1 - checkpoint.T5]}
        with one_for_all():
            return whole(own, transformer, x, sigma, shorter)

    with patch.object(StableDiffusion3, "predict", few):
        yield


@torch.no_grad()
def follow(average: Any, model: Any, rate: float) -> None:
    """Move the average's weights towards the model's."""
    for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
        ours.lerp_(theirs, 1 - rate)


def resumed(state: Path, parts: dict[str, Any]) -> int:
    """Load what an interrupted training kept; returns the step to go on with."""
    if not state.exists():
        return 0
    kept = torch.load(state, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(kept[name])
    return int(kept["step"])
