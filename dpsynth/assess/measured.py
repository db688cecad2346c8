"""Everything that `dpsynth evaluate` measures of one set of samples, phase by phase."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.sheet import rows_by_class, side_by_side
from dpsynth.assess import attributes, domain, tasks
from dpsynth.assess.bootstrap import LEVEL
from dpsynth.assess.compare import MOST, Figures, Job, compared
from dpsynth.assess.density import K_DENSITY
from dpsynth.assess.features import FeatureSpace, inception_space, lenet_space
from dpsynth.assess.imagesets import RESIZING, letters
from dpsynth.assess.metrics import NEIGHBOURS
from dpsynth.assess.perceptual import NO_WEIGHTS as NO_ALEXNET
from dpsynth.assess.perceptual import load_perceptual
from dpsynth.assess.probes import PROTOCOL, SEEDS, WIDE_PROTOCOL, wide_total
from dpsynth.console import note, progress
from dpsynth.errors import UsageError
from dpsynth.models.inception import WEIGHTS, load_inception
from dpsynth.models.lenet import LeNet, training_steps
from dpsynth.planning.captions import Template
from dpsynth.planning.schema import ImageShape

FORMAT = "dpsynth-evaluation-2"
NO_WEIGHTS = (
    "Inception FID left blank: there are no weights, and none are ever downloaded. Name "
    f"pytorch-fid's {WEIGHTS} with --inception-weights; the built-in LeNet features are shown."
)
NO_LABELS = (
    "no accuracy, label consistency, per-class distance or diversity: they need labels on both "
    "sides, and one side has none"
)
FEATURE_EPOCHS = 5
SHOWS_REAL = "curator only, shows real records"
CURATOR = "curator-only: computed from private records without noise"
MAY_GO = "may be released: every input is declared public, or was released"

_NAME = re.compile("[a-z0-9][a-z0-9._-]*")

Probe = Literal["lenet", "wrn", "both"]


@dataclass(frozen=True)
class Settings:
    """What is measured, and by what.

    Attributes:
        probe: which classifier gives the accuracy.
        full: the wide probe at the public benchmark's size.
        feature_steps: optimiser steps of the network behind the built-in features.
        inception: pytorch-fid's weights; None leaves FID blank.
        alexnet: torchvision's weights behind LPIPS; None leaves it blank.
        template: the captions' template, whose slots are measured one by one.
        countable: whether a bar may show how many steps the features' network takes. A plan's are
            declared; those of a private set tell how many records it has.
        public: whether all that goes in is public or released.
        copies: whether the training records are known, so that copies of them can be sought.
        picture: where the closest pairs are drawn; None draws none.
        name: of the plan or the set, above that picture.
    """

    feature_steps: int
    probe: Probe = "lenet"
    full: bool = False
    inception: Path | None = None
    alexnet: Path | None = None
    template: Template | None = None
    countable: bool = True
    public: bool = False
    copies: bool = True
    picture: Path | None = None
    name: str = ""

    @property
    def wide(self) -> bool:
        """Whether the wide probe is asked for."""
        return self.probe != "lenet"


def measured(job: Job, settings: Settings, title: str) -> Figures:
    """All measures by name; `title` is what progress calls the samples."""
    space, net = _space(job, settings, title)
    figures: Figures = {}
    if _labelled(job):
        if settings.probe != "wrn":
            with progress(f"{title}: accuracy", 2 * len(SEEDS) * job.steps) as bar:
                figures["accuracy"] = tasks.accuracy(job, bar.advance)
        if settings.wide:
            figures["accuracy_wide"] = _wide(job, settings, title)
    else:
        job.notes.append(NO_LABELS)
    with progress(f"{title}: distances in features"):
        figures |= compared(job, space)
        if net is not None and _labelled(job):
            figures["label_consistency"] = tasks.label_consistency(job, net)
    with progress(f"{title}: domain rate", domain.STEPS) as bar:
        figures["domain_rate"] = tasks.domain(job, bar.advance)
    figures |= _captioned(job, settings, title)
    figures["inception"] = _inception(job, settings, title)
    if settings.copies and min(len(job.train[0]), len(job.held_out[0])) < 2:
        job.notes.append("no copy check: it needs two real records or more on each side")
    elif settings.copies:
        with progress(f"{title}: copy check", 100) as bar:
            who = "public" if settings.public else SHOWS_REAL
            name = f"{settings.name or title}: closest pairs of the copy check; {who}"
            figures["copies"] = tasks.copies(
                job, space, bar.advance, settings.picture, name, public=settings.public
            )
    return figures


def _labelled(job: Job) -> bool:
    return all(len(labels) and labels.min() >= 0 for _, labels in (job.samples, job.held_out))


def _space(job: Job, settings: Settings, title: str) -> tuple[FeatureSpace, LeNet | None]:
    """The built-in features: of the real training records, of letters where these lack labels."""
    images, labels = job.train
    total = settings.feature_steps if settings.countable else None
    with progress(f"{title}: the features' network", total) as bar:
        advance = bar.advance if settings.countable else None
        if labels.min() >= 0:
            return lenet_space(
                images,
                labels,
                job.classes,
                steps=settings.feature_steps,
                cache=job.cache,
                progress=advance,
            )
        drawn = letters(ImageShape(height=28, width=28, channels=images.shape[3]))
        space, _ = lenet_space(
            drawn.images,
            drawn.labels,
            len(drawn.classes),
            steps=training_steps(len(drawn), FEATURE_EPOCHS),
            cache=None,
            progress=advance,
            of="rendered letters",
        )
        return space, None


def _wide(job: Job, settings: Settings, title: str) -> Figures:
    count = len(job.samples[0])
    with progress(f"{title}: accuracy of the wide probe", 2 * wide_total(count)) as bar:
        return tasks.wide_accuracy(job, bar.advance, full=settings.full)


def _captioned(job: Job, settings: Settings, title: str) -> Figures:
    """What is measured of samples that were drawn for captions."""
    figures: Figures = {}
    if job.captioned is None:
        return figures
    if settings.template is not None:
        total = settings.feature_steps * len(settings.template.names)
        with progress(f"{title}: attributes of captions", total) as bar:
            found = tasks.attributes(job, settings.template, settings.feature_steps, bar.advance)
        figures["attributes"] = {"slots": found}
    if settings.alexnet is None:
        note(NO_ALEXNET)
        return figures | {"lpips": None}
    with progress(f"{title}: LPIPS by caption"):
        figures["lpips"] = tasks.lpips(job, load_perceptual(settings.alexnet))
    return figures


def _inception(job: Job, settings: Settings, title: str) -> Figures:
    if settings.inception is None:
        note(NO_WEIGHTS)
        return {"fid": None, "note": NO_WEIGHTS}
    space = inception_space(load_inception(settings.inception), sha256_file(settings.inception))
    with progress(f"{title}: Inception features (minutes for every 10,000 images)"):
        found = compared(job, space)
    return {"fid": found.pop("frechet"), **found}


def head(job: Job, settings: Settings) -> Figures:
    """What a report starts with: its format, who may see it, and the protocol."""
    return {
        "format": FORMAT,
        "room": "public" if settings.public else "curator",
        "who_may_see_it": MAY_GO if settings.public else CURATOR,
        "classes": list(job.names),
        "protocol": {
            "probe": PROTOCOL,
            "probe_steps": job.steps,
            **({"wide_probe": WIDE_PROTOCOL} if settings.wide else {}),
            "feature_steps": settings.feature_steps,
            "domain_rate": domain.PROTOCOL,
            **({"attributes": attributes.PROTOCOL} if settings.template else {}),
            "frechet": "pytorch-fid's estimators in float64; more images than features required",
            "precision_recall": f"improved precision and recall, k={NEIGHBOURS}, all pairs",
            "density_coverage": f"Naeem et al. (2020), k={K_DENSITY}, all pairs",
            "kernel": "unbiased squared MMD, cubic polynomial kernel, means over random subsets",
            "intervals": f"two-sided, confidence {LEVEL:g}; how is said beside each",
            "most_images_a_side": MOST,
            "sizes": RESIZING,
            "ceiling": "as many real training records as samples (all of them if fewer)",
            "floor": "the plan's public images, evenly thinned; accuracy: the majority class",
        },
    }


def suffix_of(model: str | None) -> str:
    """What a model's name adds to `samples` and `evaluation`, in names of folders and files.

    Raises UsageError for any but a plain name: with a slash it would lead into another room.

    >>> suffix_of(None), suffix_of("prior")
    ('', '-prior')
    """
    if model is None:
        return ""
    if not _NAME.fullmatch(model):
        raise UsageError(
            "--model is no name of samples",
            hint="NAME of released/samples-NAME: small letters, digits, dot, - and _",
        )
    return f"-{model}"


def count_of(figures: Figures) -> int:
    """How many measures there are, the copy check among them."""
    found = [value for value in figures.values() if isinstance(value, dict)]
    slots = figures.get("attributes", {}).get("slots", {})
    return sum("synthetic" in value or "verdict" in value for value in found) + len(slots)


def absent_classes(job: Job) -> list[str]:
    """Declared classes without a sample; a note names them."""
    if not _labelled(job):
        return []
    counts = np.bincount(job.samples[1], minlength=job.classes)
    absent = [name for name, count in zip(job.names, counts, strict=True) if count == 0]
    if absent:
        job.notes.append(f"no sample of {len(absent)} declared classes: {', '.join(absent)}")
    return absent


def sheet(job: Job, path: Path, name: str, *, public: bool) -> Path:
    """Synthetic beside real held-out images: it shows real records."""
    if _labelled(job):
        synthetic, real = (rows_by_class(*side, job.names) for side in (job.samples, job.held_out))
    else:
        synthetic, real = (_rows(side[0]) for side in (job.samples, job.held_out))
    rows = [
        (title, [left, right]) for (title, left), (_, right) in zip(synthetic, real, strict=True)
    ]
    who = "public" if public else SHOWS_REAL
    stamp = {"dpsynth": "public" if public else "curator-only"}
    side_by_side(rows, ["synthetic", "real, held out"], path, f"{name}: {who}", stamp)
    if not public:
        path.chmod(0o600)  # the room is closed to others; so is a copy of the file
    return path


def _rows(images: Any) -> list[tuple[str, Any]]:
    """The first images without their classes, ten in a row."""
    return [("", images[start : start + 10]) for start in range(0, 50, 10)]
