"""`dpsynth evaluate --samples A --reference B`: any image set against any other, by one ruler.

No run is needed, so that other tools' output is measured as a run's samples are: the same networks,
the same steps, the same ceiling. With the training records as `train_reference` and the held-out
ones as `reference`, values are those that the run itself would report.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import owner_only, sha256_file, storage_error, write_json
from dpsynth.artifacts.manifest import NAME as MANIFEST
from dpsynth.artifacts.nonprivate import is_stamped
from dpsynth.artifacts.rooms import LOCK_NAME, in_curators_room
from dpsynth.artifacts.samples import content_digest, read_samples
from dpsynth.assess.attributes import Captioned, drawn_for
from dpsynth.assess.compare import MOST, Figures, Job, Pair
from dpsynth.assess.features import content_hash
from dpsynth.assess.imagesets import (
    ImageSet,
    halves,
    joint_classes,
    letters,
    paths_of,
    read_set,
    shared,
)
from dpsynth.assess.measured import (
    FEATURE_EPOCHS,
    Probe,
    Settings,
    absent_classes,
    count_of,
    head,
    measured,
    sheet,
    suffix_of,
)
from dpsynth.assess.perceptual import find_backbone
from dpsynth.errors import DataError, UsageError, typed
from dpsynth.models.inception import find_weights
from dpsynth.models.lenet import Images, training_steps
from dpsynth.planning.schema import ImageShape, SourceHeldOut
from dpsynth.planning.sources import plan_file
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.public.sources import read_public
from dpsynth.released.handout import hand_out

PROBE_EPOCHS = 10
LEAST_FLOOR = 100
"""Fewest letters of a floor that no plan declares."""
REPORT, SHEET, COPIES = "evaluation.json", "evaluation.png", "copies.png"
HALVED = (
    "no training records were named: the reference was split in two by a hash of each image; one "
    "half taught the features and is the ceiling, the other is compared with. There is no copy "
    "check: nobody said which records the samples were made from"
)


def compare_sets(
    samples: str | Path,
    reference: str | Path,
    output: Path,
    *,
    public_reference: bool = False,
    train_reference: str | Path | None = None,
    probe: Probe = "lenet",
    full: bool = False,
    inception_weights: Path | None = None,
    lpips_weights: Path | None = None,
    classes: Sequence[str] | None = None,
    floor: Images | None = None,
    reveal: bool = False,
) -> dict[str, Any]:
    """Measure one image set against another; write `evaluation.json` and `evaluation.png`.

    Args:
        samples: what is measured: folder, zip, NPZ or IDX; see `imagesets.read_set`.
        reference: the real records to compare with, which nothing has learned from.
        output: folder for report and sheet; made if absent.
        public_reference: both references are public: then the report may be released. Otherwise
            it is for the curator alone: files of mode 0600, stamped.
        train_reference: real records that the samples were made from, for the ceiling and the
            features; None splits the reference in two.
        probe: which classifier gives the accuracy: "lenet", "wrn" or "both".
        full: the wide probe at the public benchmark's size.
        inception_weights: pytorch-fid's weights file; None looks into torch's hub cache.
        lpips_weights: torchvision's AlexNet, for sets with captions; None looks there too.
        classes: the declared classes; None takes those of the references.
        floor: public images (k, H, W, C) of the references' shape; None draws letters.
        reveal: whether errors may name images of the references.

    Returns:
        The report as written; `findings` is the number of measures, `sheet` the path of the sheet.

    Raises:
        MissingError: a set or the named weights are not there.
        UsageError: no image set; a curator-only report in a folder that is handed out; or a report
            to be released on images that are the curator's.
        DataError: a set that cannot be read, labels that the reference lacks.
    """
    _require_room(output, public_reference)
    if public_reference:
        _require_released(samples)
    ruler = _Ruler(
        probe,
        full,
        find_weights(inception_weights),
        find_backbone(lpips_weights),
        public_reference,
        halved=train_reference is None,
        picture=output / COPIES,
    )
    reveal = reveal or public_reference
    held, learned = _references(reference, train_reference, None, reveal=reveal)
    drawn = read_set(samples, "--samples", shape=held.shape, reveal=reveal)
    names = tuple(classes or joint_classes(held, learned))
    sets = _Sets.of(drawn, held, learned, names)
    job = _job(sets, floor, ruler)
    with contextlib.nullcontext() if public_reference else owner_only():
        _make(output)
        report = _reported(job, sets, ruler, output / SHEET, "image sets")
        write_json(output / REPORT, report)
    return report


def evaluate_in_public(
    verified: VerifiedPlan,
    reference: str | Path,
    *,
    model: str | None = None,
    public_reference: bool,
    train_reference: str | Path | None = None,
    probe: Probe = "lenet",
    full: bool = False,
    inception_weights: Path | None = None,
    lpips_weights: Path | None = None,
) -> tuple[dict[str, Any], Path]:
    """Measure a run's samples against a public reference; opens no private file.

    Everything that goes in is public or released, so the report goes to the hand-out:
    `released/evaluation-public.json` and `.png`, listed in its manifest.

    Args:
        verified: the run; its samples must have been drawn.
        reference: public images, brought to the plan's shape; labels among the plan's classes.
        model: measures `released/samples-MODEL/` instead of `released/samples/`.
        public_reference: must be True: the caller says that the references are public.
        train_reference: see `compare_sets`.
        probe: see `compare_sets`.
        full: see `compare_sets`.
        inception_weights: see `compare_sets`.
        lpips_weights: see `compare_sets`.

    Returns:
        The report, and where it lies.

    Raises:
        UsageError: the references are not declared public, or lie where the run's private records
            or its curator's files do; `model` is no name.
        MissingError, DataError: as `compare_sets`.
    """
    if not public_reference:
        raise UsageError("a report that may be released needs a public reference")
    plan, run, suffix = verified.plan, verified.run, suffix_of(model)
    _require_apart(verified, {"--reference": reference, "--train-reference": train_reference})
    halved = train_reference is None
    weights = find_weights(inception_weights), find_backbone(lpips_weights)
    ruler = _Ruler(probe, full, *weights, public=True, halved=halved)
    shape, folder = plan.private.image, run.released / f"samples{suffix}"
    size = (shape.height, shape.width, shape.channels)
    drawn = ImageSet(*read_samples(folder, plan.private.classes, size), tuple(plan.private.classes))
    digest = content_digest(folder)
    if plan.private.captions is not None:
        drawn = replace(drawn, texts=tuple(drawn_for(folder)))
    held, learned = _references(reference, train_reference, shape, reveal=True)
    sets = _Sets.of(drawn, held, learned, drawn.classes)
    job = _job(sets, read_public(plan, run).images, ruler)
    path = run.released / f"evaluation-public{suffix}.json"
    report = _reported(job, sets, ruler, path.with_suffix(".png"), plan.name)
    report["samples"]["metadata_sha256"] = sha256_file(folder / "metadata.csv")
    report["samples"]["content_sha256"] = digest  # `hand_out` tells by it what is out of date
    # The run folder's own path says where it lay at the custodian's: no news for a recipient.
    report |= {"noise_source": verified.noise_source, "sheet": path.with_suffix(".png").name}
    write_json(path, report)
    hand_out(run)
    return report, path


@dataclass(frozen=True)
class _Ruler:
    """What measures, whether the references are public, and whether they are halves of one."""

    probe: Probe
    full: bool
    inception: Path | None
    alexnet: Path | None
    public: bool
    halved: bool
    picture: Path | None = None


@dataclass(frozen=True, eq=False)
class _Sets:
    """The three sets, of one shape and with labels under one list of classes."""

    samples: ImageSet
    reference: ImageSet
    train_reference: ImageSet

    @classmethod
    def of(
        cls, drawn: ImageSet, held: ImageSet, learned: ImageSet, names: Sequence[str]
    ) -> "_Sets":
        if not held.labelled:
            return cls(drawn.without_labels(), held, learned)
        return cls(
            drawn.under(names, "--samples"),
            held.under(names, "--reference"),
            learned.under(names, "--train-reference"),
        )


def _reported(job: Job, sets: _Sets, ruler: _Ruler, picture: Path, name: str) -> Figures:
    """Measure, draw the sheet, and put the report together."""
    steps = training_steps(len(job.train[0]), FEATURE_EPOCHS)
    settings = Settings(
        steps,
        ruler.probe,
        ruler.full,
        ruler.inception,
        ruler.alexnet,
        countable=ruler.public,
        public=ruler.public,
        copies=not ruler.halved,
        picture=ruler.picture,
        name=name,
    )
    figures = measured(job, settings, "comparing sets")
    path = sheet(job, picture, name, public=ruler.public)
    return {
        **head(job, settings),
        "reference_declared_public": ruler.public,
        **figures,
        "samples": {"count": len(job.samples[0]), "absent_classes": absent_classes(job)},
        "sets": {name: _facts(getattr(sets, name)) for name in _Sets.__dataclass_fields__},
        "findings": count_of(figures),
        "notes": job.notes,
        "sheet": str(path),
    }


def _references(
    reference: str | Path, train: str | Path | None, shape: ImageShape | None, *, reveal: bool
) -> tuple[ImageSet, ImageSet]:
    """Held-out and training records, of one shape: that of `reference` where none is given."""
    held = read_set(reference, "--reference", shape=shape, reveal=reveal)
    if train is None:
        learned, held = halves(held)
        if not len(learned) or not len(held):
            raise DataError("--reference holds too few images to be split in two")
        return held, learned
    learned = read_set(train, "--train-reference", shape=held.shape, reveal=reveal)
    if held.labelled is not learned.labelled:
        raise DataError(
            "one of the references has labels and the other has none",
            hint="label both, or neither",
        )
    return held, learned


def _job(sets: _Sets, floor: Images | None, ruler: _Ruler) -> Job:
    drawn, held, learned = sets.samples, sets.reference, sets.train_reference
    count = min(MOST, max(LEAST_FLOOR, len(drawn)))
    job = Job(
        names=held.classes,
        samples=_pair(drawn),
        train=_pair(learned),
        held_out=_pair(held),
        public=cache(lambda: letters(held.shape, count).images if floor is None else floor),
        public_key=lambda: content_hash("letters", count) if floor is None else content_hash(floor),
        probe_epochs=PROBE_EPOCHS,
        captioned=_captioned(sets),
    )
    if ruler.halved:
        job.notes.append(HALVED)
        return job
    both = shared(learned.images, held.images)
    if both:
        job.notes.append(
            f"{both} training records lie in the reference too: ceilings are too good by them"
        )
    return job


def _captioned(sets: _Sets) -> tuple[Captioned, Captioned, Captioned] | None:
    """The sets with their captions; None unless all have them."""
    found = [
        Captioned(one.images, one.texts)
        for one in (sets.samples, sets.train_reference, sets.reference)
        if one.texts is not None
    ]
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def _pair(found: ImageSet) -> Pair:
    return found.images, found.labels


def _facts(found: ImageSet) -> Figures:
    """What a report says of a set: no path and no name of a file."""
    height, width, channels = found.images.shape[1:]
    return {
        "count": len(found),
        "shape": [height, width, channels],
        "labelled": found.labelled,
        "resized": found.resized,
        "sha256": content_hash(found.images, found.labels),
    }


def _require_room(output: Path, public: bool) -> None:
    """Refuse a report in a room of a run that others see, or in a hand-out wherever it lies."""
    what = "a report on public sets" if public else "a curator-only report"
    for place in (output.absolute(), output.resolve()):
        for room in (place, *place.parents):
            inside = room.name in {"released", "public"} and (room.parent / LOCK_NAME).is_file()
            if inside or all((room / name).is_file() for name in (LOCK_NAME, MANIFEST)):
                room_is = f"a run's {room.name}/" if inside else "a hand-out"
                raise UsageError(
                    f"--output lies in {room_is}, where this does not belong: {what}",
                    hint="--output DIR outside of it",
                )


def _require_released(samples: str | Path) -> None:
    """Refuse to measure for the public what is the curator's: a reference, or a curator's room."""
    parts = [part for part in paths_of(samples, "--samples") if part is not None]
    if any(is_stamped(part) or in_curators_room(part) for part in parts):
        raise UsageError(
            "--samples is curator-only: a report on it may not be released, whatever it is held "
            "against",
            hint="leave --public-reference out: the report is then the curator's",
        )


def _require_apart(verified: VerifiedPlan, references: dict[str, str | Path | None]) -> None:
    """Refuse as public what the run itself holds for private, by whatever path it is named."""
    private = [verified.run.curator.resolve(), *_private_paths(verified)]
    for what, given in references.items():
        parts = () if given is None else paths_of(given, what)
        for path in [part.resolve() for part in parts if part is not None]:
            if any(path.is_relative_to(own) or own.is_relative_to(path) for own in private):
                raise UsageError(
                    f"{what} is or holds private records of this run, or files of its curator/: "
                    "such a reference is not public",
                    hint="name other images, or measure in private: "
                    + typed("dpsynth", "evaluate", verified.run.root),
                )


def _private_paths(verified: VerifiedPlan) -> Iterator[Path]:
    """Where the private records lie now, and where the plan says; none of a plan with public ones.

    Copies under other paths are not found: no private file is opened for the comparison.
    """
    if verified.plan.private.public:
        return
    for plan in (verified.plan, load_plan(plan_file(verified.run))):
        source, held_out = plan.private.source, plan.private.held_out
        for kept in (source, held_out.source if isinstance(held_out, SourceHeldOut) else source):
            for value in kept.model_dump().values():
                if isinstance(value, Path):
                    yield value.resolve()


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(output, error) from error
