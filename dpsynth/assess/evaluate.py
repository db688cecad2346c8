"""`dpsynth evaluate`: synthetic samples against held-out real records. Curator-only.

Every figure stands beside a ceiling (real training records in the samples' place) and a floor
(the public images, or a constant answer), measured in the same run under the same protocol.
`docs/evaluation.md` defines each. Looks at private data without noise: nothing here is released.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.samples import PLAIN, read_samples
from dpsynth.artifacts.sheet import rows_by_class, side_by_side
from dpsynth.assess.compare import MOST, Figures, Job, Pair, compared, probe_steps, thinned
from dpsynth.assess.features import inception_space, lenet_space, remembered
from dpsynth.assess.metrics import NEIGHBOURS, frechet_distance
from dpsynth.assess.probes import PROTOCOL, SEEDS, majority, probe_score
from dpsynth.console import note, progress
from dpsynth.errors import DataError, typed
from dpsynth.models.inception import WEIGHTS, find_weights, load_inception
from dpsynth.models.lenet import Images, predict, training_steps
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.vault import open_private

FORMAT = "dpsynth-evaluation-1"
NO_WEIGHTS = (
    "Inception FID left blank: there are no weights, and none are ever downloaded. Name "
    f"pytorch-fid's {WEIGHTS} with --inception-weights; the built-in LeNet features are shown."
)


def evaluate(
    verified: VerifiedPlan,
    *,
    inception_weights: Path | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Measure the samples of a run; write `curator/evaluation.json` and `evaluation.png`.

    Of a plan that augments its samples, those without augmentation are measured too, into
    `evaluation-plain.json`; each measure of the report then holds their value as `plain`.

    Args:
        verified: the run; its samples must have been drawn.
        inception_weights: pytorch-fid's weights file; None looks into torch's hub cache.
        model: measures `released/samples-MODEL/` alone, into `evaluation-MODEL.json`.

    Returns:
        The report as written; `findings` is the number of measures, `sheet` the path of the sheet.

    Raises:
        MissingError: no samples yet, or the named weights are absent.
        DataError: damaged samples, or no usable record on one side of the split.
    """
    weights = find_weights(inception_weights)
    augments = model is None and verified.plan.sampling.augment is not None
    names = [PLAIN, None] if augments else [model]
    samples = [_drawn(verified, name) for name in names]
    real = _real(verified)
    verified.run.make_rooms()
    reports = {
        name: _measured(verified, name, drawn, real, weights)
        for name, drawn in zip(names, samples, strict=True)
    }
    report = reports[model]
    if augments:
        _put_beside(report, reports[PLAIN])
        report["samples_plain"] = reports[PLAIN]["samples"]
        report["findings"] += reports[PLAIN]["findings"]
    for name, found in reports.items():
        write_json(verified.run.curator / f"evaluation{_suffix(name)}.json", found, mode=0o600)
    return report


def _measured(
    verified: VerifiedPlan,
    name: str | None,
    samples: Pair,
    real: tuple[Pair, Pair],
    weights: Path | None,
) -> Figures:
    """The report on one folder of samples."""
    suffix, feature_steps = _suffix(name), _feature_steps(verified)
    total = feature_steps + 2 * len(SEEDS) * probe_steps(verified, len(samples[0]))
    with progress(f"evaluating samples{suffix}", total) as bar:
        job = Job(verified, samples, *real, bar)
        figures = _builtin(job, feature_steps)
    figures["inception"] = _inception(job, weights)
    return {
        **_head(job, feature_steps),
        **figures,
        "samples": _samples(job, verified.run.released / f"samples{suffix}"),
        "findings": len(figures),
        "notes": job.notes,
        "sheet": str(_sheet(job, verified.run.curator / f"evaluation{suffix}.png")),
    }


def _put_beside(figures: Figures, plain: Figures) -> None:
    """Give each measure that has a `synthetic` value that of `plain` samples as `plain`."""
    for key, value in figures.items():
        other = plain.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if "synthetic" in value:
                value["plain"] = other["synthetic"]
            else:
                _put_beside(value, other)


def _drawn(verified: VerifiedPlan, name: str | None) -> Pair:
    """The samples of that name; None: the plan's own."""
    private, folder = verified.plan.private, verified.run.released / f"samples{_suffix(name)}"
    image = private.image
    return read_samples(folder, private.classes, (image.height, image.width, image.channels))


def _suffix(name: str | None) -> str:
    return "" if name is None else f"-{name}"


def distance_to_held_out(verified: VerifiedPlan, images: Images) -> float:
    """Frechet distance of other images uint8 (n, H, W, C) to the held-out records.

    In the run's built-in features: the unit in which benchmarks express relative distances.
    Curator-only.

    Raises:
        UsageError: fewer images on a side than features.
    """
    train, held_out = _real(verified)
    cache, classes = verified.run.curator / "cache", len(verified.plan.private.classes)
    space, _ = lenet_space(*train, classes, steps=_feature_steps(verified), cache=cache)
    first, second = (space.features(thinned(side)) for side in (images, held_out[0]))
    return frechet_distance(first, second)


def _real(verified: VerifiedPlan) -> tuple[Pair, Pair]:
    private = open_private(verified)
    train, held_out = private.train.arrays(), private.held_out.arrays()
    if not len(train[0]) or not len(held_out[0]):
        raise DataError(
            "one side of the split has no usable record",
            hint=typed("dpsynth", "check", verified.run.root),
        )
    return train, held_out


def _feature_steps(verified: VerifiedPlan) -> int:
    """From the declared capacity, so that the progress bar tells no true count."""
    plan = verified.plan
    return training_steps(plan.private.capacity, plan.evaluation.feature_epochs)


def _builtin(job: Job, feature_steps: int) -> Figures:
    space, net = lenet_space(
        *job.train, job.classes, steps=feature_steps, cache=job.cache, progress=job.bar.advance
    )
    return {
        "accuracy": _accuracy(job),
        **compared(job, space),
        "label_consistency": float(np.mean(predict(net, job.samples[0]) == job.samples[1])),
    }


def _accuracy(job: Job) -> Figures:
    """Probes on the samples; ceiling: on real training records; floor: a constant answer."""
    synthetic = probe_score(job.samples, job.held_out, job.classes, job.steps, job.bar.advance)

    def ceiling() -> Figures:
        subset = job.real_subset()
        return probe_score(subset, job.held_out, job.classes, job.steps, job.bar.advance).to_json()

    real = remembered(job.key("probe", job.steps), ceiling)
    constant = majority(job.held_out[1], job.classes)
    return {
        "synthetic": synthetic.mean,
        "ceiling": real["mean"],
        "floor": constant,
        "chance": 1 / job.classes,
        "probe_spread": {"synthetic": synthetic.spread, "ceiling": real["spread"]},
    }


def _inception(job: Job, weights: Path | None) -> Figures:
    if weights is None:
        note(NO_WEIGHTS)
        return {"fid": None, "note": NO_WEIGHTS}
    space = inception_space(load_inception(weights), sha256_file(weights))
    with progress("evaluating: Inception features (minutes for every 10,000 images)"):
        measured = compared(job, space)
    return {"fid": measured.pop("frechet"), **measured}


def _head(job: Job, feature_steps: int) -> Figures:
    plan = job.verified.plan
    return {
        "format": FORMAT,
        "room": "curator",
        "noise_source": job.verified.noise_source,
        "private_source_declared_public": plan.private.public,
        "classes": list(plan.private.classes),
        "protocol": {
            "probe": PROTOCOL,
            "probe_steps": job.steps,
            "feature_steps": feature_steps,
            "frechet": "pytorch-fid's estimators in float64; more images than features required",
            "precision_recall": f"improved precision and recall, k={NEIGHBOURS}, all pairs",
            "most_images_a_side": MOST,
            "ceiling": "as many real training records as samples (all of them if fewer)",
            "floor": "the plan's public images, evenly thinned; accuracy: the majority class",
        },
    }


def _samples(job: Job, folder: Path) -> Figures:
    counts = np.bincount(job.samples[1], minlength=job.classes)
    names = job.verified.plan.private.classes
    absent = [name for name, count in zip(names, counts, strict=True) if count == 0]
    if absent:
        job.notes.append(f"no sample of {len(absent)} declared classes: {', '.join(absent)}")
    return {
        "count": len(job.samples[0]),
        "absent_classes": absent,
        "metadata_sha256": sha256_file(folder / "metadata.csv"),
    }


def _sheet(job: Job, path: Path) -> Path:
    """Synthetic beside real held-out images: shows private records, so curator-only."""
    names = job.verified.plan.private.classes
    synthetic, real = (rows_by_class(*side, names) for side in (job.samples, job.held_out))
    rows = [(name, [left, right]) for (name, left), (_, right) in zip(synthetic, real, strict=True)]
    title = f"{job.verified.plan.name}: curator only, shows real records"
    stamp = {"dpsynth": "curator-only"}
    side_by_side(rows, ["synthetic", "real, held out"], path, title, stamp)
    path.chmod(0o600)  # the room is closed to others; so is a copy of the file
    return path
