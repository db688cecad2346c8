"""What samples serve: accuracy of probes, label consistency, domain rate, attributes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpsynth.assess.attributes import Captioned, attribute_accuracies
from dpsynth.assess.bootstrap import mean_interval, share_interval
from dpsynth.assess.compare import Figures, Job, figure
from dpsynth.assess.confusion import Confusion
from dpsynth.assess.copies import closest_pairs, copy_check, pairs
from dpsynth.assess.domain import ASIDE as FEWEST_PUBLIC
from dpsynth.assess.domain import domain_rate
from dpsynth.assess.features import FeatureSpace
from dpsynth.assess.nearest import Space, aligned_space, pixel_space
from dpsynth.assess.perceptual import (
    Perceptual,
    PerceptualScore,
    caption_pairs,
    lpips_by_caption,
)
from dpsynth.assess.probes import (
    WIDE_EPOCHS,
    ProbeScore,
    majority,
    probe_score,
    wide_score,
)
from dpsynth.models.lenet import Labels, LeNet, predict
from dpsynth.planning.captions import Template

Progress = Callable[[float], None]


def accuracy(job: Job, progress: Progress) -> Figures:
    """LeNet probes on the samples; ceiling: on real training records; floor: a constant answer."""

    def score(train: tuple[Any, Any]) -> ProbeScore:
        return probe_score(train, job.held_out, job.classes, job.steps, progress)

    return _accuracy(job, score, "probe", job.steps)


def wide_accuracy(job: Job, progress: Progress, *, full: bool) -> Figures:
    """As `accuracy`, of the wide residual network; `full`: of the public benchmark's size."""

    def score(train: tuple[Any, Any]) -> ProbeScore:
        return wide_score(train, job.held_out, job.classes, full=full, progress=progress)

    return _accuracy(job, score, "wide", WIDE_EPOCHS, full)


def _accuracy(
    job: Job, score: Callable[[tuple[Any, Any]], ProbeScore], kind: str, *key: Any
) -> Figures:
    job.short("accuracy", len(job.held_out[0]), len(job.held_out[0]))
    synthetic = score(job.samples)
    subset = job.real_subset()
    real = job.kept(f"{kind}-scores", lambda: score(subset).to_json(), *key)
    names = list(job.names)
    found = figure(
        synthetic.mean,
        mean_interval(synthetic.hits),
        ceiling=real["mean"],
        floor=majority(job.held_out[1], job.classes),
        chance=1 / job.classes,
        probe_spread={"synthetic": synthetic.spread, "ceiling": real["spread"]},
        n=_counts(job) | {"ceiling": len(subset[0])},
        classes=synthetic.confusion.per_class(names),
        ceiling_classes=Confusion.from_json(real["confusion"]).per_class(names),
        confusion=synthetic.confusion.to_json(),
        ceiling_confusion=real["confusion"],
    )
    extra = synthetic.to_json().keys() - {"mean", "spread", "confusion"}
    return found | {key: synthetic.to_json()[key] for key in sorted(extra)}


def label_consistency(job: Job, net: LeNet) -> Figures:
    """Share of samples that a classifier of real records gives the label they were drawn for.

    StraightDP, D.1, Table 5. Ceiling: the same share of held-out records and their true labels.
    Floor: chance, 1/Y.
    """
    job.short("consistency", len(job.samples[0]), len(job.samples[0]))
    hits = _hits(net, job.samples)
    real = _hits(net, job.held_out)
    return figure(
        float(np.mean(hits)),
        share_interval(int(hits.sum()), len(hits)),
        ceiling=float(np.mean(real)),
        floor=1 / job.classes,
        n=_counts(job) | {"ceiling": len(real)},
    )


def domain(job: Job, progress: Progress) -> Figures:
    """Share of samples that a classifier of private records against public images calls private."""
    public = job.public()
    if len(public) < FEWEST_PUBLIC:
        job.notes.append(f"no domain rate: it needs {FEWEST_PUBLIC} public images or more")
        return figure(None, ceiling=None, floor=None, n=_counts(job))
    found = domain_rate(
        job.samples[0],
        job.train[0],
        job.held_out[0],
        public,
        cache=job.cache,
        progress=progress,
    )
    count = len(found.hits)
    job.short("domain", count, count)
    interval = share_interval(int(found.hits.sum()), count)
    return figure(found.synthetic, interval) | found.to_json()


def attributes(job: Job, template: Template, steps: int, progress: Progress) -> dict[str, Figures]:
    """Of each slot of the template, and of all together, the share of samples that show it.

    Raises:
        DataError: a caption that is no filling of the template, or a side without records.
    """
    if job.captioned is None:
        return {}
    found = attribute_accuracies(
        *job.captioned, template, job.names, steps=steps, cache=job.cache, progress=progress
    )
    return {
        slot: figure(one.synthetic, share_interval(int(one.hits.sum()), len(one.hits)))
        | one.to_json()
        for slot, one in found.items()
    }


def lpips(job: Job, perceptual: Perceptual) -> Figures | None:
    """LPIPS between images of one caption: samples and held-out records; None without a pair.

    Ceiling: training records in the samples' place. Floor: public images, each as if it had the
    caption of some held-out record.
    """
    if job.captioned is None:
        return None
    samples, train, held_out = job.captioned
    if not len(caption_pairs(samples.captions, held_out.captions)):
        job.notes.append("no LPIPS: no caption of the samples is one of the reference's")
        return None

    def score(side: Captioned) -> PerceptualScore:
        return lpips_by_caption(*side, *held_out, perceptual)

    def references() -> Figures:
        public = job.public()[: len(held_out.captions)]
        matched = len(caption_pairs(train.captions, held_out.captions)) > 0
        return {
            "ceiling": score(train).mean if matched else None,
            "floor": score(Captioned(public, held_out.captions[: len(public)])).mean,
        }

    own = score(samples)
    job.short("lpips", own.pairs, own.pairs)
    kept = job.kept("lpips", references, perceptual.name, job.public_key())
    counts = {"pairs": own.pairs, "captions": own.captions, "unmatched": own.unmatched}
    return figure(own.mean, own.interval, n=counts, features=perceptual.name) | kept


def copies(
    job: Job,
    space: FeatureSpace,
    progress: Progress,
    picture: Path | None,
    title: str,
    *,
    public: bool,
) -> Figures:
    """The copy check in pixels, in aligned pixels and in features; the closest pairs as a picture.

    `progress` is called with percent of the work: counts of pairs would tell that of the records.
    """
    images, train, held_out = job.samples[0], job.train[0], job.held_out[0]
    shape = (images.shape[1], images.shape[2], images.shape[3])
    named = Space(space.name, lambda part: space.features(part).astype(np.float32))
    spaces = (pixel_space(shape), aligned_space(shape), named)
    total = len(spaces) * pairs(len(images), len(train), len(held_out))
    found = copy_check(images, train, held_out, spaces, lambda done: progress(100 * done / total))
    report = found.to_json()
    if picture is not None:
        closest_pairs(found, images, train, held_out, picture, title=title, public=public)
        report["picture"] = str(picture)
    return report


def _hits(net: LeNet, pair: tuple[Any, Labels]) -> Any:
    return predict(net, pair[0]) == pair[1]


def _counts(job: Job) -> dict[str, int]:
    return {"synthetic": len(job.samples[0]), "held_out": len(job.held_out[0])}
