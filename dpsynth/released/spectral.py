"""Drawing spectral tokens, and completing coarse ones (DP-Wavelet, algorithm 2).

Coarse tokens come from the privately trained transformer; the frozen public one goes on from them.
Post-processing.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.token_file import Ids
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.wavelet.autoregressive import Autoregressive, load_transformer
from dpsynth.models.wavelet.sampling import Drawing, sample
from dpsynth.models.wavelet.transform import Pyramid
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.tokenizer import TOKENIZER
from dpsynth.public.tokens import (
    TRANSFORMER,
    TokenSpace,
    load_token_space,
    sizes_of,
)
from dpsynth.released.asked import Asked
from dpsynth.released.drawing import Route, caption_facts, model_path
from dpsynth.released.drawn import Drawn, Made

BATCH = 128
CACHE = 1 << 28
"""Bytes that the keys and values of one batch may take: larger models take fewer images at once."""


def drawing_of(plan: Plan) -> Drawing:
    """How the plan draws a token from its logits."""
    how = plan.sampling
    return Drawing(how.temperature, how.top_k, how.guidance)


def drawing_facts(plan: Plan) -> dict[str, Any]:
    """What the samples' origin says of it."""
    how = plan.sampling
    facts: dict[str, Any] = {"temperature": how.temperature, "guidance": how.guidance}
    return facts if how.top_k is None else {**facts, "top_k": how.top_k}


def space_facts(run: RunDir) -> dict[str, str]:
    """Hashes of the public tokenizer and transformer."""
    return {
        "tokenizer_sha256": sha256_file(run.public / TOKENIZER),
        "transformer_sha256": sha256_file(run.public / TRANSFORMER),
    }


def drawn_on(
    model: Autoregressive,
    text: Tensor,
    prefix: Tensor,
    upto: int,
    *,
    drawing: Drawing,
    source: torch.Generator,
) -> Tensor:
    """Tokens int64 (n, upto): prefixes (n, p) and what the model draws after them, in batches.

    text: captions (n, ...) as the model reads them.
    """
    size, found = batch_size(model, drawing), [prefix[:0].new_empty((0, upto))]
    for start in range(0, len(prefix), size):
        part = slice(start, start + size)
        given = prefix[part]
        coins = torch.rand(len(given), upto - given.shape[1], dtype=torch.float64, generator=source)
        found.append(sample(model, text[part], coins, drawing, prefix=given))
    return torch.cat(found)


def batch_size(model: Autoregressive, drawing: Drawing) -> int:
    """How many images are drawn at once, so that the cache takes at most `CACHE` bytes or so."""
    sizes = model.sizes
    branches = 1 if drawing.guidance in (0.0, 1.0) else 2
    numbers = 2 * sizes.depth * sizes.width * (sizes.tokens + sizes.text.length)
    return max(1, min(BATCH, CACHE // (4 * numbers * branches)))


def token_pictures(verified: VerifiedPlan, count: int, route: Route, asked: Asked) -> Made:
    """How a plan of kind tokens draws, and of what.

    Its own model draws the private tokens, which are decoded as they are and kept for completion.
    The untouched prior, and a model in raster order, draw whole images.

    Raises MissingError: a model or the sentence encoder is not there.
    """
    plan, run = verified.plan, verified.run
    space, drawing = load_token_space(run, plan), drawing_of(plan)
    model, facts = _model(run, plan, space, route.model)
    coarse = plan.is_completed and route.model != "prior"
    upto = space.dim if coarse else space.tokenizer.layout.tokens
    captions = space.text_of(asked.captions)

    def pictures(labels: Tensor, source: torch.Generator) -> Drawn:
        nothing = torch.zeros(len(labels), 0, dtype=torch.int64)
        ids = drawn_on(model, captions[labels], nothing, upto, drawing=drawing, source=source)
        return Drawn(space.decode(ids), narrow(ids) if coarse else None)

    origin = {"model": route.model, "count": count, "tokens": upto, **facts}
    origin |= {**caption_facts(plan, asked), **drawing_facts(plan)}
    if not coarse:
        return Made(pictures, origin)
    return Made(pictures, origin, upto, facts["tokenizer_sha256"])


def _model(
    run: RunDir, plan: Plan, space: TokenSpace, name: str
) -> tuple[Autoregressive, dict[str, str]]:
    """The transformer of that name, and the hashes of all that is drawn with."""
    facts = space_facts(run)
    if name == "prior":
        return space.transformer, facts
    path: Path = model_path(run, name)
    model, _ = load_transformer(path, sizes_of(plan))
    return model, {"model_sha256": sha256_file(path), **facts}


def completed(
    space: TokenSpace,
    prefix: Tensor,
    ll: Tensor | None,
    text: Tensor,
    *,
    drawing: Drawing,
    source: torch.Generator,
) -> NDArray[np.uint8]:
    """Whole images (n, H, W, C) of coarse tokens (n, p), the rest drawn by the public transformer.

    ll: approximations (n, h, w, C) that are kept as they are, so that tokens decide on the details
    alone; None takes the ones that the tokens decode to.
    """
    upto = space.tokenizer.layout.tokens
    ids = drawn_on(space.transformer, text, prefix, upto, drawing=drawing, source=source)
    if ll is None:
        return space.decode(ids)
    found = [np.zeros((0, *space.tokenizer.wavelet.shape), dtype=np.uint8)]
    for part, low in zip(torch.split(ids, BATCH), torch.split(ll, BATCH), strict=True):
        details = space.tokenizer.decode_pyramid(part).details
        images = space.tokenizer.wavelet.inverse(Pyramid(low, details)).clamp(0.0, 1.0)
        found.append(as_bytes(images.permute(0, 3, 1, 2)))
    return np.concatenate(found)


def narrow(ids: Tensor) -> Ids:
    """Ids as they are stored, int32."""
    kept: Ids = ids.to(torch.int32).numpy()
    return kept
