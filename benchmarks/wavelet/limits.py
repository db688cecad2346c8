"""What holds a token method back: its tokenizer, its public completion, or its private model.

Private images go through the tokenizer and back (`rebuilt`), and with their own coarse tokens
through the public completion (`completed`): what a perfect private model would score. The rest of
a row's distance is the private model's, that is the transformer's, the budget's or the data's. A
look for the curator alone: nothing is chosen by it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.wavelet.judge import PART, Captioned, Judge


def limits(run: Path, judge: Judge, count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Scores of `count` private images, rebuilt and completed by a run's public room."""
    from dpsynth.models.wavelet.sampling import Drawing, sample
    from dpsynth.planning.verify import load_verified
    from dpsynth.public.tokens import load_token_space

    verified = load_verified(run)
    space, drawn = load_token_space(verified.run, verified.plan), verified.plan.sampling
    order = np.random.default_rng(seed).permutation(len(judge.private.texts))[:count]
    some = judge.private.rows(order)
    ids = space.encode(some.images)
    found = {"rebuilt": judge.score(_as(some, space.decode(ids)))}
    if not verified.plan.is_completed:
        return found
    prefix, text = ids[:, : space.dim], space.text_of(some.texts)
    coins = torch.rand(
        (count, ids.shape[1] - space.dim),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    drawing = Drawing(drawn.temperature, drawn.top_k, drawn.guidance)
    parts = zip(*(torch.split(rows, PART) for rows in (prefix, text, coins)), strict=True)
    whole = torch.cat(
        [sample(space.transformer, told, own, drawing, prefix=p) for p, told, own in parts]
    )
    return found | {
        "coarse alone": judge.score(_as(some, space.decode(prefix))),
        "completed": judge.score(_as(some, space.decode(whole))),
    }


def _as(given: Captioned, images: Any) -> Captioned:
    return Captioned(images, given.texts, given.labels)
