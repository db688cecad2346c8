"""Public pretraining of the spectral transformer: token ids and captions of public images.

DP-Wavelet, section 3: private training starts from a transformer that public image-text pairs
taught; the same one, frozen, completes the fine tokens. Both parts learn here, together.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from dpsynth.console import note, progress
from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.autoregressive import (
    Autoregressive,
    drop_captions,
    load_transformer,
    save_transformer,
    token_losses,
)
from dpsynth.models.wavelet.causal import Sizes
from dpsynth.planning.training import Prior
from dpsynth.public.kept import made_by
from dpsynth.public.prior import average, endless

WARM_UP = 0.05
"""Share of the steps in which the learning rate rises."""
NORM = 1.0
"""The most that a batch's gradient norm may be."""


@dataclass(frozen=True)
class Pairs:
    """Public image-text pairs: tokens int64 (n, T), captions (n, ...) as the model reads them."""

    ids: Tensor
    text: Tensor

    def check(self, sizes: Sizes) -> None:
        """Refuse pairs that the model cannot learn from (UsageError)."""
        if self.ids.ndim != 2 or self.ids.shape[1] != sizes.tokens or not len(self.ids):
            raise UsageError(
                f"public tokens came as {tuple(self.ids.shape)}, expected (n, {sizes.tokens})"
            )
        if len(self.text) != len(self.ids):
            raise UsageError(f"{len(self.ids)} public images have {len(self.text)} captions")
        if int(self.ids.min()) < 0 or int(self.ids.max()) >= sizes.codes:
            raise UsageError(f"public tokens lie outside a codebook of {sizes.codes} entries")


@dataclass(frozen=True)
class Fitted:
    """A pretrained transformer (the average of its weights), and each part's loss by step.

    losses: nats a token, a row (coarse, fine) a step, or (all,) in raster order.
    """

    model: Autoregressive
    losses: list[tuple[float, ...]] = field(repr=False)


def fit_transformer(
    pairs: Pairs,
    sizes: Sizes,
    settings: Prior,
    *,
    seed: int,
    advance: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> Fitted:
    """Train on public pairs by cross entropy, AdamW under warm-up and a cosine; give its EMA.

    The loss is the mean over the parts of the mean over a part's tokens, so that the few coarse
    tokens count as much as the many fine ones. `settings.label_dropout` drops captions, for
    guidance in sampling. `advance` is called once a step.

    Raises:
        UsageError: pairs that do not fit the sizes.
    """
    pairs.check(sizes)
    source = generator(seed)
    with seeded_initialisation(seed):
        model = Autoregressive(sizes).to(device)
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    index, losses = endless(len(pairs.ids), settings.batch, source), []
    for step in range(settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * _share(step, settings.steps)
        chosen = next(index)
        text = pairs.text[chosen]
        text = drop_captions(text, model.null(text), settings.label_dropout, source)
        found = _part_losses(model, pairs.ids[chosen].to(device), text.to(device))
        optimiser.zero_grad()
        found.mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimiser.step()
        # A young average follows the model closely, or it would keep the random start.
        average(averaged, model, min(settings.ema, (1 + step) / (10 + step)))
        losses.append(tuple(found.tolist()))
        advance()
    return Fitted(averaged.cpu().eval(), losses)


def pretrain_transformer(
    path: Path,
    pairs: Pairs,
    sizes: Sizes,
    settings: Prior,
    *,
    seed: int,
    recipe: str,
    device: str = "cpu",
) -> Autoregressive:
    """The public transformer at `path`: kept if made by this recipe, else trained and written.

    recipe: a hash of all that decides the result, settings, seed and public content. Shows
    progress on stderr. What is returned is what the file holds.
    """
    if made_by(path, recipe):
        note("transformer: kept")
        return load_transformer(path, sizes)[0]
    with progress("transformer: public tokens, coarse to fine", settings.steps) as bar:
        fitted = fit_transformer(
            pairs, sizes, settings, seed=seed, advance=bar.advance, device=device
        )
    last = fitted.losses[-max(1, settings.steps // 20) :]
    means = [sum(column) / len(last) for column in zip(*last, strict=True)]
    note("transformer: loss a token " + ", ".join(f"{mean:.3f}" for mean in means) + " nats")
    save_transformer(
        fitted.model, path, room="public", recipe=recipe, losses=" ".join(map(repr, means))
    )
    return load_transformer(path, sizes)[0]


@torch.no_grad()
def losses_by_token(model: Autoregressive, pairs: Pairs, *, batch: int = 64) -> Tensor:
    """Mean cross entropy (T,) in nats of each place's token over public pairs, float64.

    On pairs kept out of training it shows which scales the model has learned.
    """
    pairs.check(model.sizes)
    total = torch.zeros(model.sizes.tokens, dtype=torch.float64)
    for start in range(0, len(pairs.ids), batch):
        part = slice(start, start + batch)
        total += token_losses(model, pairs.ids[part], pairs.text[part]).double().sum(dim=0)
    return total / len(pairs.ids)


def _part_losses(model: Autoregressive, ids: Tensor, text: Tensor) -> Tensor:
    """Mean loss of each part's tokens, (1 or 2,)."""
    losses = token_losses(model, ids, text)
    return torch.stack([losses[:, part.start : part.stop].mean() for part in model.parts])


def _share(step: int, steps: int) -> float:
    """The learning rate's share at step `step` from 0: a linear rise, then a cosine to zero.

    >>> [round(_share(step, 40), 2) for step in (0, 1, 2, 21, 39)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rise = max(1, int(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
