"""Score autoencoder recipes on public images alone: `python -m benchmarks.recipe [PLAN]`.

A recipe is chosen before any budget is spent, so it may only be chosen by public scores. Part of
the plan's public images stands in for the private ones: half of the letters of its first source of
letters or glyphs, or with `--held-out N` its whole N-th public source. Candidates train on the rest
for `--steps` steps, or for as many as fit into `--seconds` (costly nets then get fewer), and
rebuild images that they never saw. For each, mean and standard deviation over `--seeds` seeds of

- error: mean squared error of reconstructions, pixels in [0, 1];
- distance: Frechet distance of sharpened reconstructions (the gain is that of the training images)
  from other held-out images, in features of a LeNet trained on further held-out images by their
  own labels;
- draws: the same of decoded draws from one Gaussian for each held-out class, without noise: how
  well the decoder draws what no image was encoded to.

Floor: every image rebuilt as the mean one; for the distance, training images in the place of
reconstructions. Ceiling: originals in their place. Distances compare at equal `--images` only.

`--try` names a candidate by what it changes in the plan's representation (repeat it):
`--try code=32,latent_noise=0.2`, `--try norm=true,hidden=512`, `--try sources=2`. Keys are `code`,
those of `representation.autoencoder`, and `sources`: places of public sources, as in `1+2`. Without
`--try`: one change at a time around the plan. Private files are never opened.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpsynth.assess.metrics import frechet_distance
from dpsynth.console import note, render, table
from dpsynth.errors import UsageError
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.finish import sharpen
from dpsynth.models.lenet import LeNet, features, train_probe, training_steps
from dpsynth.models.seeding import generator
from dpsynth.planning.schema import Autoencoder, ImageShape, Plan, Representation
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.public.fit import fit_autoencoder
from dpsynth.public.perceptual import feature_loss
from dpsynth.public.representation import AutoencoderCodec, standardised
from dpsynth.public.sharpening import class_draws, source_gains
from dpsynth.public.sources import PublicImages, read_public

PLAN = Path(__file__).resolve().parent.parent / "plans/mnist-class.yaml"
MEASURES = ("error", "distance", "draws")
PROBE_EPOCHS, WARM_UP, TIMED = 5, 5, 25


@dataclass(frozen=True)
class HeldOut:
    """Held-out images in three parts: what is rebuilt, what it is compared with, the probe's own.

    `rebuilt`, `reference` uint8 (n, H, W, C), `labels` int64 (n,) of what is rebuilt; `probe` is
    trained on the third part by its labels.
    """

    rebuilt: np.ndarray
    labels: np.ndarray
    reference: np.ndarray
    probe: LeNet

    def distance(self, images: np.ndarray) -> float:
        """Frechet distance of images (n, H, W, C) from the reference, in the probe's features."""
        own, reference = (features(self.probe, part) for part in (images, self.reference))
        return frechet_distance(own, reference)


@dataclass(frozen=True)
class Candidate:
    """A named recipe; `sources` are the places, from 0, of the sources that it trains on."""

    name: str
    settings: Representation
    sources: tuple[int, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", nargs="?", type=Path, default=PLAN)
    parser.add_argument("--try", dest="changes", action="append", metavar="KEY=VALUE,...")
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, help="time each candidate; overrides --steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=5_000, help="most in each held-out part")
    parser.add_argument(
        "--held-out", type=int, metavar="N", help="hold out public source N, from 1"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    report = measure(
        load_plan(options.plan),
        options.changes,
        steps=options.steps,
        seconds=options.seconds,
        seeds=options.seeds,
        most=options.images,
        source=options.held_out,
    )
    print_report(report, options.json)


def measure(
    plan: Plan,
    changes: Sequence[str] | None = None,
    *,
    steps: int = 2_000,
    seconds: float | None = None,
    seeds: int = 3,
    most: int = 5_000,
    source: int | None = None,
) -> dict[str, Any]:
    """Scores of all candidates, with floor and ceiling; `source` counts from 1."""
    public = read_public(plan)
    taught, held, why = divided(public, source)
    stand_in = held_out(public, np.flatnonzero(held), most, plan.public_seed)
    rows = []
    for candidate in candidates(plan, changes or default_changes(plan), len(public.sources)):
        chosen = taught & np.isin(public.source, candidate.sources)
        if not chosen.any():
            note(f"{candidate.name}: left out, its sources are held out")
            continue
        training = subset(public, chosen)
        scores = []
        for seed in range(seeds):
            note(f"{candidate.name}, seed {seed}")
            count = steps if seconds is None else affordable(candidate, training, seconds)
            scores.append(score(candidate, training, stand_in, steps=count, seed=seed))
        rows.append({"recipe": candidate.name, **summarised(scores)})
    ends = {"floor": floor(subset(public, taught), stand_in), "ceiling": ceiling(stand_in)}
    return {"plan": plan.name, "held_out": why, "seeds": seeds, "rows": rows, **ends}


def divided(public: PublicImages, source: int | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Masks (n,) of training and of held-out images, and what was held out in words.

    By default every other letter of the first source of letters or glyphs (without one, every
    other class of the first source). No other such source is trained on then: it draws the same
    letters.
    """
    count = len(public.sources)
    if source is not None and not 1 <= source <= count:
        raise UsageError(f"--held-out is {source}, the plan has {count} public sources")
    if source is not None:
        held = public.source == source - 1
        return ~held, held, f"source {source} ({public.sources[source - 1].kind})"
    drawn = sorted(set(public.source[public.drawn].tolist()))
    first = drawn[0] if drawn else 0
    own = public.source == first
    held = own & (public.labels % 2 == 1)
    others = public.drawn & ~own if drawn else np.zeros_like(own)
    return ~held & ~others, held, f"half of the classes of source {first + 1}"


def held_out(public: PublicImages, chosen: np.ndarray, most: int, seed: int) -> HeldOut:
    """Shuffle the `chosen` indices into three parts of at most `most`; train the probe on one."""
    order = np.random.default_rng(seed).permutation(chosen)
    size = min(most, len(order) // 3)
    rebuilt, reference, own = (order[size * part : size * (part + 1)] for part in range(3))
    values, labels = np.unique(public.labels[own], return_inverse=True)
    probe = train_probe(
        public.images[own],
        labels.astype(np.int64),
        len(values),
        steps=training_steps(size, PROBE_EPOCHS),
        seed=seed,
    )
    return HeldOut(public.images[rebuilt], public.labels[rebuilt], public.images[reference], probe)


def subset(public: PublicImages, chosen: np.ndarray) -> PublicImages:
    """The chosen images alone (mask (n,)), and the sources that still have some."""
    facts = [
        replace(one, count=int((chosen & (public.source == place)).sum()))
        for place, one in enumerate(public.sources)
    ]
    kept = tuple(one for one in facts if one.count)
    return PublicImages(public.images[chosen], public.labels[chosen], public.classes, kept)


def default_changes(plan: Plan) -> list[str]:
    """One change at a time around the plan's own recipe."""
    own, code = plan.representation.autoencoder, plan.representation.code
    changes = ["", f"code={max(2, code * 2 // 3)}", f"code={code * 4 // 3}"]
    changes += [f"latent_noise={own.latent_noise / 2}", f"latent_noise={own.latent_noise * 2}"]
    changes += [f"width={2 * own.width}", f"hidden={2 * (own.hidden or 8 * own.width)}"]
    changes += [
        "deform=0" if own.deform else "deform=0.6",
        "perceptual=0" if own.perceptual else "perceptual=0.3",
    ]
    changes += [f"norm={str(not own.norm).lower()}"]
    if len(plan.public) > 1:
        changes += [f"sources={place + 1}" for place in range(len(plan.public))]
    return changes


def candidates(plan: Plan, changes: Sequence[str], sources: int) -> list[Candidate]:
    """The candidates that `changes` describe, each as `key=value,key=value`; "" is the plan's own.

    Raises:
        UsageError: a key or a value that no recipe has.
    """
    if plan.representation.kind != "autoencoder":
        raise UsageError("the plan's representation is no autoencoder: there is no recipe to score")
    return [_candidate(plan.representation, text, sources) for text in changes]


def _candidate(base: Representation, text: str, sources: int) -> Candidate:
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    places = given.pop("sources", "+".join(str(place + 1) for place in range(sources)))
    values = {key: _value(value) for key, value in given.items()}
    code = values.pop("code", base.code)
    try:
        settings = Autoencoder.model_validate({**base.autoencoder.model_dump(), **values})
        whole = {**base.model_dump(), "code": code, "autoencoder": settings}
        chosen = tuple(int(place) - 1 for place in str(places).split("+"))
        if not set(chosen) <= set(range(sources)):
            raise ValueError(f"sources={places}, and the plan has {sources}")
        return Candidate(text or "as planned", Representation.model_validate(whole), chosen)
    except ValueError as error:
        raise UsageError(f"--try {text}: {error}") from error


def _value(text: str) -> Any:
    """A number, true, false or null as JSON has them; else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def affordable(candidate: Candidate, training: PublicImages, seconds: float) -> int:
    """How many training steps of the candidate fit into `seconds`, by timing a few."""
    times: list[float] = []
    fit(candidate, training, WARM_UP + TIMED, 0, lambda: times.append(time.perf_counter()))
    each = (times[-1] - times[WARM_UP - 1]) / TIMED
    return max(1, math.floor(seconds / each))


def fit(
    candidate: Candidate,
    training: PublicImages,
    steps: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> AutoencoderCodec:
    """Train one candidate for `steps` steps; `advance` is called after each."""
    height, width, channels = training.images.shape[1:]
    settings = candidate.settings.autoencoder
    model = fit_autoencoder(
        training.images,
        candidate.settings,
        ImageShape.model_validate({"height": height, "width": width, "channels": channels}),
        seed=seed,
        drawn=training.drawn,
        steps=steps,
        perceived=feature_loss(training, settings, seed + 5),
        advance=advance,
    )
    return AutoencoderCodec(model)


def score(
    candidate: Candidate,
    training: PublicImages,
    stand_in: HeldOut,
    *,
    steps: int,
    seed: int,
) -> dict[str, float]:
    """Train one candidate and rebuild the held-out images."""
    start = time.perf_counter()
    codec = fit(candidate, training, steps, seed)
    seconds = time.perf_counter() - start
    space = standardised(codec, training.images)
    gain = min(source_gains(space, training, seed))
    codes = space.encode(stand_in.rebuilt)
    decoded = space.decode_pixels(codes).float()
    drawn = class_draws(codes, torch.from_numpy(stand_in.labels), generator(seed))
    return {
        "error": squared_error(as_bytes(decoded), stand_in.rebuilt),
        "distance": stand_in.distance(as_bytes(sharpen(decoded, gain))),
        "draws": stand_in.distance(as_bytes(sharpen(space.decode_pixels(drawn).float(), gain))),
        "gain": gain,
        "steps": steps,
        "seconds": seconds,
    }


def floor(training: PublicImages, stand_in: HeldOut) -> dict[str, float]:
    """The mean held-out image in each one's place; for the distance, training images instead."""
    mean = stand_in.rebuilt.mean(axis=0, keepdims=True)
    order = np.random.default_rng(0).permutation(len(training.images))[: len(stand_in.rebuilt)]
    distance = stand_in.distance(training.images[order])
    error = squared_error(mean, stand_in.rebuilt)
    return {"error": error, "distance": distance, "draws": distance}


def ceiling(stand_in: HeldOut) -> dict[str, float]:
    """What originals in the reconstructions' place score."""
    distance = stand_in.distance(stand_in.rebuilt)
    return {"error": 0.0, "distance": distance, "draws": distance}


def squared_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Mean squared difference of images in [0, 255], as of pixels in [0, 1]."""
    return float(np.mean((found.astype(np.float32) - wanted) ** 2, dtype=np.float64) / 255.0**2)


def summarised(scores: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Mean of each figure over the seeds, and the standard deviation of those that count."""
    result: dict[str, Any] = {}
    for key in scores[0]:
        values = [one[key] for one in scores]
        result[key] = statistics.fmean(values)
        if key in MEASURES:
            result[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return result


def print_report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    lines = [_line(row["recipe"], row) for row in report["rows"]]
    lines += [_line(end, report[end]) for end in ("ceiling", "floor")]
    title = f"{report['plan']}: held out {report['held_out']}, {report['seeds']} seeds"
    columns = ("recipe", *MEASURES, "gain", "steps", "seconds")
    render(table(columns, lines, title=title))


def _line(name: str, row: dict[str, Any]) -> list[str]:
    figures = []
    for key in MEASURES:
        deviation = row.get(f"{key}_std")
        figures.append(f"{row[key]:.4g}" + (f" ± {deviation:.2g}" if deviation is not None else ""))
    others = [f"{row[key]:.3g}" if key in row else "" for key in ("gain", "steps", "seconds")]
    return [name, *figures, *others]


if __name__ == "__main__":
    main()
