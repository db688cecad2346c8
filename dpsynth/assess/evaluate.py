"""`dpsynth evaluate` of a run: synthetic samples against held-out real records.

Every figure stands beside a ceiling (real training records in the samples' place) and a floor
(the public images, or a constant answer), measured in the same run under the same protocol, and
has an interval. `docs/evaluation.md` defines each. Looks at private data without noise: nothing
here is released, unless the plan declares its private source public.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.nonprivate import is_stamped
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import PLAIN, read_samples
from dpsynth.assess.attributes import Captioned, captioned_records, drawn_for
from dpsynth.assess.compare import Figures, Job, Pair, public_key, thinned
from dpsynth.assess.features import content_hash, lenet_space
from dpsynth.assess.imagesets import read_set
from dpsynth.assess.measured import (
    Probe,
    Settings,
    absent_classes,
    count_of,
    head,
    measured,
    sheet,
    suffix_of,
)
from dpsynth.assess.metrics import frechet_distance
from dpsynth.assess.perceptual import find_backbone
from dpsynth.errors import DataError, typed
from dpsynth.models.inception import find_weights
from dpsynth.models.lenet import Images, training_steps
from dpsynth.planning.captions import Template
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.sources import read_public
from dpsynth.vault import open_private


def evaluate(
    verified: VerifiedPlan,
    *,
    inception_weights: Path | None = None,
    lpips_weights: Path | None = None,
    model: str | None = None,
    probe: Probe = "lenet",
    full: bool = False,
) -> dict[str, Any]:
    """Measure the samples of a run; write `curator/evaluation.json` and `evaluation.png`.

    Of a plan that augments its samples, those without augmentation are measured too, into
    `evaluation-plain.json`; each measure of the report then holds their value as `plain`.

    Args:
        verified: the run; its samples must have been drawn.
        inception_weights: pytorch-fid's weights file; None looks into torch's hub cache.
        lpips_weights: torchvision's AlexNet, for plans with captions; None looks there too.
        model: measures `released/samples-MODEL/` alone, into `evaluation-MODEL.json`.
        probe: which classifier gives the accuracy: "lenet", "wrn" or "both".
        full: the wide probe at the public benchmark's size.

    Returns:
        The report as written; `findings` is the number of measures, `sheet` the path of the sheet.

    Raises:
        MissingError: no samples yet, or the named weights are absent.
        UsageError: `model` is no name.
        DataError: damaged samples, or no usable record on one side of the split.
    """
    weights = inception_weights, lpips_weights
    settings = _settings(verified, probe, full=full, weights=weights)
    augments = model is None and verified.plan.sampling.augment is not None
    names = [PLAIN, None] if augments else [model]
    samples = [_drawn(verified, name) for name in names]
    real = _real(verified)
    verified.run.make_rooms()
    reports = {
        name: _measured(verified, suffix_of(name), drawn, real, settings)
        for name, drawn in zip(names, samples, strict=True)
    }
    report = reports[model]
    if augments:
        _put_beside(report, reports[PLAIN])
        report["samples_plain"] = reports[PLAIN]["samples"]
        report["findings"] += reports[PLAIN]["findings"]
    for name, found in reports.items():
        write_json(verified.run.curator / f"evaluation{suffix_of(name)}.json", found, mode=0o600)
    return report


def evaluate_others(
    verified: VerifiedPlan,
    given: str | Path,
    *,
    inception_weights: Path | None = None,
    lpips_weights: Path | None = None,
    probe: Probe = "lenet",
    full: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Measure images from elsewhere as samples of this run are: a reference, or another tool's.

    Writes `curator/evaluation-of-NAME.json` and its pictures, NAME being the folder's or file's.
    Nothing else changes: what is handed out is not touched.

    Args:
        verified: the run whose private records they are held against.
        given: a folder, zip, NPZ or IDX file (see `imagesets.read_set`); a relative path that is
            not there is taken from the run's folder.
        inception_weights: see `evaluate`.
        lpips_weights: see `evaluate`.
        probe: see `evaluate`.
        full: see `evaluate`.

    Returns:
        The report, and where it lies.

    Raises:
        MissingError: there is no such set, or the named weights are absent.
        DataError: a set that cannot be read, an undeclared label, or no usable record on one side
            of the split.
    """
    plan, run = verified.plan, verified.run
    path = Path(given)
    inside = run.root / path
    path = inside if not path.exists() and inside.exists() else path
    found = read_set(path if path == inside else given, "--samples", shape=plan.private.image)
    found = found.under(plan.private.classes, "--samples")
    weights = inception_weights, lpips_weights
    settings = _settings(verified, probe, full=full, weights=weights)
    facts = {
        "sha256": content_hash(found.images, found.labels),
        "nonprivate_reference": is_stamped(path),
    }
    texts = None if found.texts is None else list(found.texts)
    drawn = _Drawn((found.images, found.labels), texts, facts)
    suffix = f"-of-{_name_of(path)}"
    run.make_rooms()
    report = _measured(verified, suffix, drawn, _real(verified), settings)
    where = run.curator / f"evaluation{suffix}.json"
    write_json(where, report, mode=0o600)
    return report, where


def _name_of(path: Path) -> str:
    """A name for reports on a folder or file, of small letters, digits, dots, - and _.

    >>> _name_of(Path("curator/reference-nonprivate")), _name_of(Path("My Images.zip"))
    ('reference-nonprivate', 'my-images')
    """
    name = path.resolve().stem.lower()
    return re.sub("[^a-z0-9._-]+", "-", name).strip("-._") or "images"


def _settings(
    verified: VerifiedPlan, probe: Probe, *, full: bool, weights: tuple[Path | None, Path | None]
) -> Settings:
    """How this run's images are measured; `weights` of Inception and AlexNet, where named."""
    captions = verified.plan.private.captions
    return Settings(
        _feature_steps(verified),
        probe,
        full,
        find_weights(weights[0]),
        find_backbone(weights[1]),
        captions if isinstance(captions, Template) else None,
    )


@dataclass(frozen=True)
class _Drawn:
    """Images with their labels, their captions if any, and what the report says of them."""

    pair: Pair
    texts: list[str] | None
    facts: Figures


def _measured(
    verified: VerifiedPlan,
    suffix: str,
    drawn: _Drawn,
    real: tuple[Pair, Pair],
    settings: Settings,
) -> Figures:
    """The report on some images, whose files end in `suffix`."""
    plan, run, samples = verified.plan, verified.run, drawn.pair
    job = Job(
        names=tuple(plan.private.classes),
        samples=samples,
        train=real[0],
        held_out=real[1],
        public=cache(lambda: read_public(plan, run).images),
        public_key=cache(lambda: public_key(verified)),
        probe_epochs=plan.evaluation.probe_epochs,
        captioned=_captioned(verified, drawn),
        cache=_cache(run),
    )
    public = plan.private.public
    pairs = run.curator / f"copies{suffix}.png"
    settings = replace(settings, public=public, picture=pairs, name=f"{plan.name}{suffix}")
    figures = measured(job, settings, f"evaluating samples{suffix}")
    path = sheet(job, run.curator / f"evaluation{suffix}.png", plan.name, public=public)
    for picture in filter(Path.is_file, (path, pairs)):
        picture.chmod(0o600)  # as all else in this room, declared public or not
    return {
        **head(job, settings),
        "noise_source": verified.noise_source,
        "private_source_declared_public": public,
        **figures,
        "samples": {
            "count": len(samples[0]),
            "absent_classes": absent_classes(job),
            **drawn.facts,
        },
        "findings": count_of(figures),
        "notes": job.notes,
        "sheet": str(path),
    }


def _captioned(
    verified: VerifiedPlan, drawn: _Drawn
) -> tuple[Captioned, Captioned, Captioned] | None:
    """Samples and records with their captions, of a plan and images that have them."""
    if verified.plan.private.captions is None or drawn.texts is None:
        return None
    private = open_private(verified)
    samples = Captioned(drawn.pair[0], drawn.texts)
    return samples, captioned_records(private.train), captioned_records(private.held_out)


def _cache(run: RunDir) -> Path:
    """The folder of what is kept between evaluations, closed to others as its room is."""
    run.make_rooms()
    kept = run.curator / "cache"
    kept.mkdir(mode=0o700, exist_ok=True)
    kept.chmod(0o700)
    return kept


def _put_beside(figures: Figures, plain: Figures) -> None:
    """Give each measure that has a `synthetic` value that of `plain` samples as `plain`."""
    for key, value in figures.items():
        other = plain.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if "synthetic" in value:
                value["plain"] = other["synthetic"]
            else:
                _put_beside(value, other)


def _drawn(verified: VerifiedPlan, name: str | None) -> _Drawn:
    """The samples of that name; None: the plan's own."""
    private, folder = verified.plan.private, verified.run.released / f"samples{suffix_of(name)}"
    image = private.image
    pair = read_samples(folder, private.classes, (image.height, image.width, image.channels))
    texts = None if private.captions is None else drawn_for(folder)
    return _Drawn(pair, texts, {"metadata_sha256": sha256_file(folder / "metadata.csv")})


def distance_to_held_out(verified: VerifiedPlan, images: Images) -> float:
    """Frechet distance of other images uint8 (n, H, W, C) to the held-out records.

    In the run's built-in features: the unit in which benchmarks express relative distances.
    Curator-only.

    Raises:
        UsageError: fewer images on a side than features.
    """
    train, held_out = _real(verified)
    kept, classes = _cache(verified.run), len(verified.plan.private.classes)
    space, _ = lenet_space(*train, classes, steps=_feature_steps(verified), cache=kept)
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
