"""Public training of the spectral tokenizer, and what it says of itself: losses, use, pictures.

The loss is a weighted mean of each scale's squared error in units of its own variance, and the
commitment of latents to their entries. With e_s that error, a_s the share of scale s in the
energy about the mean image and g the `emphasis`, it is sum_s a_s^g e_s / sum_s a_s^g: g = 1 is the
pixels' own squared error, 0 counts every scale alike.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.sheet import side_by_side
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.console import note, progress
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.models.wavelet.quantise import Learner, Use
from dpsynth.models.wavelet.stored import load_tokenizer, save_tokenizer
from dpsynth.models.wavelet.tokenizer import Rebuilt, Tokenizer, TokenizerSettings
from dpsynth.public.kept import made_by

TOKENIZER, SHEET = "tokenizer.safetensors", "tokens.png"
_WARM_UP, _POINTS, _PART, _SEEN = 0.1, 50, 256, 4_096
Altered = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class TokenizerTraining:
    """How a tokenizer is trained.

    commitment: weight of that loss; decay: of the codebook's averages; dead: below this share of
    an even use an entry is drawn anew; emphasis: g above.
    """

    steps: int = 2_000
    batch: int = 64
    learning_rate: float = 1e-3
    commitment: float = 0.25
    decay: float = 0.95
    dead: float = 0.1
    emphasis: float = 0.5


@dataclass(frozen=True)
class Point:
    """Losses at a step: `errors` by scale, in units of the scale's variance."""

    step: int
    errors: tuple[float, ...]
    commitment: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"step": self.step, "errors": list(self.errors), "commitment": self.commitment}


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained tokenizer in eval mode, and some 50 points of its losses."""

    tokenizer: Tokenizer
    curve: list[Point]


def fit_tokenizer(
    images: NDArray[np.uint8],
    settings: TokenizerSettings,
    training: TokenizerTraining,
    *,
    seed: int,
    altered: Altered | None = None,
    device: str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> Fitted:
    """Train on public bytes (n, H, W, C); AdamW under one cycle.

    `altered` moves floats (b, H, W, C) in [0, 1] before they are seen. `advance` is called once a
    step.
    """
    data, source = torch.from_numpy(images), generator(seed)

    def seen(index: Tensor) -> Tensor:
        batch = data[index].float() / 255.0
        return (batch if altered is None else altered(batch, source)).to(device)

    with seeded_initialisation(seed):  # the library draws from torch's global generator
        tokenizer = Tokenizer(settings)
        _standardise(tokenizer, data)
        tokenizer.to(device)
        indices = islice(_endless(data, training, source), training.steps)
        curve = _descent(tokenizer, map(seen, indices), training, advance)
    return Fitted(tokenizer.cpu().eval().requires_grad_(False), curve)


def _descent(
    tokenizer: Tokenizer,
    seen: Iterable[Tensor],
    training: TokenizerTraining,
    advance: Callable[[], None],
) -> list[Point]:
    """Train on batches (b, H, W, C), one a step, and settle the codebooks."""
    learners, weights = _learners(tokenizer, training), _weights(tokenizer, training.emphasis)
    rate, steps = training.learning_rate, training.steps
    optimiser = torch.optim.AdamW(tokenizer.parameters(), lr=rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=_rise(steps))
    curve: list[Point] = []
    for step, batch in enumerate(seen):
        rebuilt: Rebuilt = tokenizer(batch, learners)
        errors = _errors(rebuilt)
        loss = (weights * errors).sum() + training.commitment * rebuilt.commitment
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(tokenizer.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % max(1, steps // _POINTS) == 0 or step == steps - 1:
            curve.append(_point(step, errors, rebuilt.commitment))
        advance()
    for learner in learners:
        learner.settle()
    return curve


def _rise(steps: int) -> float:
    """The share of `steps` in which the rate rises, a tenth; more where that is a single step.

    Torch's cycle divides by the last step of the rise, which is then step 0.
    """
    return 2 / steps if round(_WARM_UP * steps, 6) == 1 else _WARM_UP


def report(tokenizer: Tokenizer, images: NDArray[np.uint8]) -> dict[str, Any]:
    """Of public images (n, H, W, C), by scale: energy, what a prefix lacks, how codes are used.

    energy: a scale's share of the sum of squares. kept: squared error a pixel of the exact
    coefficients up to the scale; decoded: of the decoded prefix; mean: of the mean image.
    """
    data = torch.from_numpy(images)
    scales = range(len(tokenizer.layout.scales))
    energy = torch.zeros(len(scales), dtype=torch.float64)
    kept, decoded, all_ids = torch.zeros_like(energy), torch.zeros_like(energy), []
    for part in torch.split(data, _PART):
        wanted = part.float() / 255.0
        pyramid, ids = tokenizer.wavelet(wanted), tokenizer.encode(wanted)
        energy += pyramid.energy().double().sum(0)
        for s in scales:
            exact = tokenizer.wavelet.inverse(pyramid.upto(s))
            given = tokenizer.decode(ids[:, : tokenizer.layout.coarse(s)])
            kept[s] += (exact - wanted).square().sum(dtype=torch.float64)
            decoded[s] += (given - wanted).square().sum(dtype=torch.float64)
        all_ids.append(ids)
    floats = images.astype(np.float64) / 255.0
    return {
        "energy": (energy / energy.sum()).tolist(),
        "kept": (kept / data.numel()).tolist(),
        "decoded": (decoded / data.numel()).tolist(),
        "mean": float(np.square(floats - floats.mean(0)).mean()),
        **_uses(tokenizer, torch.cat(all_ids)),
    }


def show_scales(tokenizer: Tokenizer, images: NDArray[np.uint8], path: Path) -> Path:
    """Draw public images (n, H, W, C), their exact and their decoded prefixes, scale by scale."""
    floats = torch.from_numpy(images).float() / 255.0
    pyramid, ids = tokenizer.wavelet(floats), tokenizer.encode(floats)
    rows = [("as it is", [images, images])]
    for s, scale in enumerate(tokenizer.layout.scales):
        exact = tokenizer.wavelet.inverse(pyramid.upto(s))
        given = tokenizer.decode(ids[:, : tokenizer.layout.coarse(s)])
        name = f"scale {s} ({scale.height} x {scale.width})"
        rows.append((name, [_bytes(exact), _bytes(given)]))
    title = f"Public images by scale: {tokenizer.layout.tokens} tokens"
    return side_by_side(rows, ["coefficients", "decoded tokens"], path, title)


def pretrain_tokenizer(
    path: Path,
    images: NDArray[np.uint8],
    settings: TokenizerSettings,
    training: TokenizerTraining,
    *,
    seed: int,
    recipe: str,
    stale: Callable[[Path], None] = lambda _: None,
    altered: Altered | None = None,
    device: str = "cpu",
) -> Tokenizer:
    """The public tokenizer at `path`: kept if made by this recipe, else trained and written.

    `stale` is called before a file is written, and may refuse. Shows progress on stderr. What is
    returned is what the file holds; its metadata keeps the losses, see `curve_of`.
    """
    if made_by(path, recipe):
        note("tokenizer: kept")
        return load_tokenizer(path, settings)[0]
    stale(path)
    with progress("tokenizer: wavelet tokens of public images", training.steps) as bar:
        fitted = fit_tokenizer(
            images,
            settings,
            training,
            seed=seed,
            altered=altered,
            device=device,
            advance=bar.advance,
        )
    curve = json.dumps([point.to_json() for point in fitted.curve])
    save_tokenizer(fitted.tokenizer, path, recipe=recipe, curve=curve)
    return load_tokenizer(path, settings)[0]


def curve_of(path: Path) -> list[dict[str, Any]]:
    """The losses of a tokenizer's training, some 50 points, as its file keeps them."""
    curve: list[dict[str, Any]] = json.loads(load_tensors(path)[1].get("curve", "[]"))
    return curve


def some(images: NDArray[np.uint8], seed: int, most: int = _SEEN) -> NDArray[np.uint8]:
    """At most `most` public images, drawn by the seed: what the report and the sheet are of."""
    chosen: NDArray[np.uint8] = images[some_rows(len(images), seed, most)]
    return chosen


def some_rows(count: int, seed: int, most: int) -> NDArray[np.int64]:
    """The rows that `some` takes of `count`."""
    rows: NDArray[np.int64] = torch.randperm(count, generator=generator(seed))[:most].numpy()
    return rows


def _standardise(tokenizer: Tokenizer, data: Tensor) -> None:
    """Centre and spread of up to `_SEEN` public images, drawn by torch's global generator."""
    tokenizer.standardise(tokenizer.wavelet(data[torch.randperm(len(data))[:_SEEN]]))


def _learners(tokenizer: Tokenizer, training: TokenizerTraining) -> list[Learner]:
    scales = tokenizer.layout.scales
    alone = tokenizer.settings.codebooks == 1
    groups = [scales] if alone else [scales[:1], scales[1:]]
    learners = []
    for g, group in enumerate(groups):
        tokens = training.batch * sum(scale.tokens for scale in group)
        codebook = tokenizer.codebook(g)
        learner = Learner(codebook, decay=training.decay, dead=training.dead, tokens=tokens)
        learners.append(learner.to(codebook.entries.device).train())
    return learners


def _weights(tokenizer: Tokenizer, emphasis: float) -> Tensor:
    counts = torch.tensor([float(scale.coefficients) for scale in tokenizer.layout.scales])
    energies = counts.to(tokenizer.spread.device) * tokenizer.spread.square()
    weights = (energies / energies.sum()) ** emphasis
    return weights / weights.sum()


def _errors(rebuilt: Rebuilt) -> Tensor:
    """Squared errors by scale, (J + 1,), in units of each scale's variance."""
    pairs = zip(rebuilt.given, rebuilt.wanted, strict=True)
    return torch.stack([(given - wanted).square().mean() for given, wanted in pairs])


def _point(step: int, errors: Tensor, commitment: Tensor) -> Point:
    return Point(step, tuple(errors.detach().tolist()), float(commitment.detach()))


def _endless(
    data: Tensor, training: TokenizerTraining, source: torch.Generator
) -> Iterator[Tensor]:
    while True:
        yield from batches(len(data), training.batch, source)


def _uses(tokenizer: Tokenizer, ids: Tensor) -> dict[str, Any]:
    """How codes are used: by codebook, and by scale."""
    by_scale = tokenizer.layout.split(ids)
    size = tokenizer.settings.codebook
    named = {"all": ids}
    if tokenizer.settings.codebooks == 2:
        named = {"approximation": by_scale[0], "details": torch.cat(by_scale[1:], dim=1)}
    return {
        "codebook": {name: _use(part, size) for name, part in named.items()},
        "use_by_scale": [_use(part, size) for part in by_scale],
    }


def _use(ids: Tensor, size: int) -> dict[str, float]:
    use = Use.of(ids, size)
    return {"share": use.share, "perplexity": use.perplexity}


def _bytes(images: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = images.clamp(0.0, 1.0).mul(255.0).round().byte().numpy()
    return data
