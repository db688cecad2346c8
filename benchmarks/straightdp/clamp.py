"""`--clamp`: what the stream-norm clamp B0 costs in public pretraining and does to gradients.

StraightDP, section 3.3: the clamp bounds the streams between blocks, so that no record's gradient
is far above the others'. For each B0 and seed the prior is trained on public codes as in the
tables' latent and pixel rows. Then, on the same draws for all:

- the flow loss on public codes that were kept out of training;
- per-record gradient norms over MNIST's codes (MNIST is public), K draws a record: their 90th
  percentile over their median.

Resumable: what is in `clamp.json` is kept.
"""

import json
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.straightdp.plans import plan_of
from benchmarks.straightdp.rows import LATENT, PIXEL
from benchmarks.straightdp.runs import Runs
from benchmarks.straightdp.score import real
from dpsynth.artifacts.rooms import RunDir
from dpsynth.models.flow import flow_loss
from dpsynth.models.seeding import generator
from dpsynth.models.velocity import captions_of, image_of
from dpsynth.planning.allocation import LATEST
from dpsynth.planning.schema import Plan
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.steps import flow_losses
from dpsynth.public.prior import fit_prior
from dpsynth.public.representation import Representation, load_representation
from dpsynth.public.sources import read_public

BOUNDS: tuple[float | None, ...] = (None, 16.0, 8.0, 4.0)
"""None, the paper's B0 (for width 192), and B0 scaled down to the compact width 48."""
SEEDS = (0, 1, 2)
SPACES = {"latent": LATENT[3], "pixel": PIXEL[3]}
HELD, PROBED, DRAWS, PART = 4_000, 1_200, 4, 200


def main(runs: Runs) -> None:
    """Measure what is not measured yet; print, and write `clamp.json`."""
    path = runs.work / "clamp.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    for space, row in SPACES.items():
        plan = Plan.model_validate(plan_of(row, 1.0, runs.work, size=runs.size))
        missing = [(b, s) for b in BOUNDS for s in SEEDS if _name(space, b, s) not in found]
        if not missing:
            continue
        bench = Bench(load_representation(RunDir(runs.room(row)), plan), plan, runs)
        for bound, seed in missing:
            found[_name(space, bound, seed)] = bench.measured(bound, seed)
            path.write_text(json.dumps(found, indent=1))
            print(_name(space, bound, seed), found[_name(space, bound, seed)], flush=True)
    show(found)


def _name(space: str, bound: float | None, seed: int) -> str:
    return f"{space} {bound or 'none'} {seed}"


class Bench:
    """Public codes in two parts, and private ones with their labels."""

    def __init__(self, space: Representation, plan: Plan, runs: Runs) -> None:
        public = read_public(plan)
        codes, labels = space.encode(public.images), torch.from_numpy(public.labels)
        order = torch.randperm(len(codes), generator=generator(7))
        self._held, self._seen = order[:HELD], order[HELD:]
        self._codes, self._labels, self._plan = codes, labels, plan
        images, classes = real("mnist", "train", runs.work)
        self._private = _inside(space.encode(images[:PROBED]), space.radius)
        self._classes = torch.from_numpy(classes[:PROBED])

    def measured(self, bound: float | None, seed: int) -> dict[str, float]:
        """Held-out loss, and the gradients' p90 over p50, of one prior."""
        plan, seen = self._plan, self._seen
        model = fit_prior(
            self._codes[seen],
            self._labels[seen],
            plan.velocity.model_copy(update={"clamp": bound}),
            plan.prior,
            plan.private.conditions,
            seed=seed,
            captions=captions_of(plan),
            image=image_of(plan),
        )
        return {"loss": self._loss(model), **self._norms(model.requires_grad_(True))}

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        source, losses = generator(11), list[float]()
        for part in self._held.split(500):
            y = self._labels[part] % self._plan.private.conditions
            losses.append(float(flow_loss(model, self._codes[part], y, generator=source)))
        return statistics.fmean(losses)

    def _norms(self, model: nn.Module) -> dict[str, float]:
        source, norms = generator(13), list[Tensor]()
        with PerExampleClipper(model, flow_losses, 1.0) as clipper:
            for start in range(0, PROBED, PART):
                z, y = self._private[start : start + PART], self._classes[start : start + PART]
                t = LATEST * torch.rand(len(z), DRAWS, generator=source)
                xi = torch.randn(len(z), DRAWS, z.shape[1], generator=source)
                norms.append(clipper.clipped_sum(z, y, t, xi).norms)
        whole = torch.cat(norms)
        half, most = float(whole.quantile(0.5)), float(whole.quantile(0.9))
        return {"median": half, "p90/p50": most / half}


def _inside(codes: Tensor, radius: float) -> Tensor:
    """Codes (n, d) clipped to the ball, as training sees them."""
    return codes * (radius / codes.norm(dim=1, keepdim=True)).clamp(max=1.0)


def show(found: dict[str, dict[str, float]]) -> None:
    """Print mean and spread over the seeds."""
    from dpsynth.console import render, table

    lines = []
    for space in SPACES:
        for bound in BOUNDS:
            runs = [found[_name(space, bound, seed)] for seed in SEEDS]
            lines.append((space, str(bound or "none"), *_spreads(runs)))
    columns = ("space", "B0", "held-out loss", "median norm", "p90 / p50")
    render(table(columns, lines, title="The stream-norm clamp, mean and spread over 3 seeds"))


def _spreads(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    columns = ([run[key] for run in runs] for key in ("loss", "median", "p90/p50"))
    return tuple(f"{statistics.fmean(c):.4f} ± {statistics.stdev(c):.4f}" for c in columns)
