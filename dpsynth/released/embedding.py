"""From a released embedding to images: a generator whose mean features match the noisy ones.

Post-processing alone. With m_y the generator's mean features of class y and mu_y the released
ones, it minimises sum_y w_y |m_y - mu_y|^2, w_y from noisy counts (DP-MERF, equations 5 and 8).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.embedding import NAME as EMBEDDING
from dpsynth.artifacts.embedding import ReleasedEmbedding, load_embedding
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.console import note, progress
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.embeddings.build import build_map
from dpsynth.models.embeddings.space import Features
from dpsynth.models.generator import (
    NAME,
    ImageGenerator,
    load_generator,
    new_generator,
    save_generator,
)
from dpsynth.models.seeding import generator
from dpsynth.planning.embedding import GeneratorFit

_DRAWN = 1_000  # images that are drawn at once: bounds memory


def train_generator(run: RunDir, settings: GeneratorFit, seed: int) -> dict[str, Any]:
    """Write `released/generator.safetensors`, unless it is there for the same inputs.

    Nothing is kept of a fit that was interrupted: it starts again, from released values.

    Raises:
        MissingError: the embedding was not released yet.
        UsageError: it is damaged, or its feature map cannot be made here.
    """
    source, path = run.released / EMBEDDING, run.released / NAME
    embedding = load_embedding(source)
    made_of = {
        "embedding_sha256": sha256_file(source),
        "settings": settings.model_dump_json(),
        "seed": str(seed),
    }
    if _is_done(path, made_of):
        note("generator: already fitted to this release")
    else:
        with progress("fitting the generator", settings.steps) as bar:
            model = fit_generator(embedding, settings, seed, bar.advance)
        save_generator(path, model, **made_of)
    return {"file": f"released/{NAME}", "steps": settings.steps, "sha256": sha256_file(path)}


def fit_generator(
    embedding: ReleasedEmbedding,
    settings: GeneratorFit,
    seed: int,
    moved: Callable[[], None] = lambda: None,
) -> ImageGenerator:
    """A generator fitted to the released embedding; `moved` is called after each step.

    Each step draws as many images of every class, 2 at least, whatever the classes' weights: these
    stand in the loss, and sees a random part of the features. Adam, its rate falling to 0 along a
    cosine.

    Raises UsageError where the feature map cannot be made here.
    """
    space = build_map(embedding.recipe)
    weights, means = _targets(embedding)
    classes, each = embedding.classes, max(2, settings.batch // embedding.classes)
    labels = torch.arange(classes).repeat_interleave(each)
    model = new_generator(
        embedding.recipe.shape,
        classes,
        settings.latent,
        (settings.width,) * settings.depth,
        seed,
        norm=settings.norm,
    ).train()
    optimiser = torch.optim.Adam(model.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.steps)
    draws = generator(seed)
    for _ in range(settings.steps):
        noise = torch.randn(len(labels), settings.latent, generator=draws)
        optimiser.zero_grad(set_to_none=True)
        part = space.part(settings.share, draws)
        images = model(noise, labels)
        loss = distance(part.features, images, part.of(means), weights, settings.spread)
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        moved()
    return model.eval()


def distance(
    space: Features, images: Tensor, means: Tensor, weights: Tensor, spread: float = 1.0
) -> Tensor:
    """Sum over classes of w_y (|m_y|^2 - 2 m_y . mu_y), |m_y|^2 without bias; a scalar.

    It is the weighted squared distance less what does not depend on the images. |m_y|^2 of b images
    is estimated by their pairs of two different ones, (b^2 |m|^2 - sum |f|^2) / (b (b - 1)): with
    the pairs of an image and itself a generator would be paid for images that are all alike.

    Args:
        space: the feature map, or a part of it.
        images: (Y b, C, H, W) in [0, 1], b >= 2 of each class, class after class.
        means: mu (Y, D).
        weights: w (Y,).
        spread: factor s of |m_y|^2; below 1 images are drawn closer together, towards the ones that
            are most like the class (docs/maths/embeddings.md, E7).
    """
    classes = len(means)
    each = len(images) // classes
    owners = torch.eye(classes).repeat_interleave(each, dim=1) / each  # (Y, Y b)
    found = space.sums(images, owners)
    alone = space.squares(images).view(classes, each).mean(dim=1)
    squares = (each * found.square().sum(1) - alone) / (each - 1)
    return (weights * (spread * squares - 2 * (found * means).sum(1))).sum()


def draw_images(
    model: ImageGenerator, labels: NDArray[np.int64], source: torch.Generator
) -> NDArray[np.uint8]:
    """One image (n, H, W, C) for each of `labels` (n,)."""
    height, width, channels = model.shape
    images = np.empty((len(labels), height, width, channels), np.uint8)
    with torch.inference_mode():
        for start in range(0, len(labels), _DRAWN):
            part = torch.from_numpy(labels[start : start + _DRAWN])
            noise = torch.randn(len(part), model.latent, generator=source)
            images[start : start + len(part)] = as_bytes(model(noise, part))
    return images


def draw_labels(
    embedding: ReleasedEmbedding, count: int, source: torch.Generator
) -> NDArray[np.int64]:
    """Labels (count,) in the classes' released proportions, in random order."""
    shares = torch.from_numpy(embedding.weights())
    drawn: NDArray[np.int64] = torch.multinomial(
        shares, count, replacement=True, generator=source
    ).numpy()
    return drawn


def _targets(embedding: ReleasedEmbedding) -> tuple[Tensor, Tensor]:
    """Weights (Y,) and mean features (Y, D), both from noisy numbers alone."""
    weights = torch.from_numpy(embedding.weights()).float()
    return weights, torch.from_numpy(embedding.means()).float()


def _is_done(path: Path, made_of: dict[str, str]) -> bool:
    if not path.exists():
        return False
    _, metadata = load_generator(path)
    return all(metadata.get(key) == value for key, value in made_of.items())
