"""How long a private step takes: coarse tokens alone, against raster order with all parameters.

Clipped sums of the engine itself on random tokens and captions: what they hold decides no time.
Models have the sizes of the plans; batches are equally large.
"""

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.wavelet.plans import METHODS, PLANS

if TYPE_CHECKING:
    from dpsynth.models.wavelet.causal import Sizes

ROUNDS, BATCH = 5, 300


def ratio(rounds: int = ROUNDS, batch: int = BATCH) -> dict[str, Any]:
    """Median seconds of a clipped sum by method, taken in turn, and their ratio."""
    from dpsynth.models.wavelet.adapt import train_coarse
    from dpsynth.models.wavelet.autoregressive import Autoregressive, coarse_losses
    from dpsynth.private.engine import PerExampleClipper

    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"wavelet": [], "raster": []}
    weights, clippers, batches = dict[str, Any](), {}, {}
    for method in seconds:
        sizes = sizes_in(PLANS / f"{METHODS[method]}.yaml")
        model = train_coarse(Autoregressive(sizes), "full", seed=0)
        weights[method] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        clippers[method] = PerExampleClipper(model, coarse_losses, 1.0)
        batches[method] = _random(sizes, batch)
    for number in range(rounds + 1):
        for method, clipper in clippers.items():
            start = time.process_time()
            clipper.clipped_sum(*batches[method])
            if number:  # the first finds its plans
                seconds[method].append(time.process_time() - start)
    medians = {method: statistics.median(values) for method, values in seconds.items()}
    return {
        "batch": batch,
        "seconds": medians,
        "weights": weights,
        "ratio": medians["wavelet"] / medians["raster"],
    }


def sizes_in(path: Path) -> "Sizes":
    """The transformer's sizes in a plan."""
    from dpsynth.planning.yaml_plan import load_plan
    from dpsynth.public.tokens import sizes_of

    return sizes_of(load_plan(path))


def _random(sizes: "Sizes", batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the private scales and captions of a batch."""
    source = torch.Generator().manual_seed(0)
    shape = (batch, sizes.coarse or sizes.tokens)
    words = (batch, sizes.text.length)
    ids = torch.randint(sizes.codes, shape, generator=source)
    return ids, torch.randint(2, sizes.text.vocabulary, words, generator=source)
