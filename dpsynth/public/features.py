"""Caption features e(c) of a caption release (equation 5): centred, clipped, with a constant.

f(c) = (s, e(c)) with s = Rtxt / 2 where an intercept is released, else f(c) = e(c): its norm is at
most `radius`. Centre and Rtxt come from public captions alone; see docs/captions.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import DataError, MissingError, PlanError, UsageError, typed
from dpsynth.models.sentence import SentenceEncoder, load_encoder
from dpsynth.planning.caption_rules import condition_captions
from dpsynth.planning.captions import CaptionRelease, FreeCaptions, Template, words_of
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import has_constant

FEATURES, HASH_KEY = "features.safetensors", "features_sha256"
FORMAT = "dpsynth-features-1"
# The constant feature, in units of Rtxt. Chosen on public codes: at Rtxt itself, means of classes
# are 15 to 21% further off, for a record's other features then have less of its norm.
INTERCEPT = 0.5
# Rounds a radius up, and a clipped vector down: no rounding takes a norm past its bound.
_UP, _DOWN = 1 + 2.0**-40, 1 - 2.0**-40

Array = NDArray[np.float64]
Encode = Callable[[list[str]], Array]


@dataclass(frozen=True, eq=False)
class CaptionFeatures:
    """A run's caption features.

    `centre` (m,), `clip` = Rtxt; `table` (Y, m): features, not yet centred, of the plan's own
    conditions, whose captions `known` numbers, as they are or by their words; `encode` of any
    other caption, if there is a way.
    """

    kind: str
    centre: Array
    clip: float
    intercept: bool
    table: Array
    known: Mapping[str, int] = field(repr=False)
    encode: Encode | None = field(default=None, repr=False)

    @property
    def dim(self) -> int:
        """Length m' of a feature vector, its constant included."""
        return len(self.centre) + self.intercept

    @property
    def radius(self) -> float:
        """The most that a feature vector's norm is: Rtxt, and sqrt(5) / 2 Rtxt with a constant."""
        return math.hypot(1.0, INTERCEPT) * self.clip * _UP if self.intercept else self.clip

    def of(self, captions: list[str]) -> Array:
        """Feature vectors f (n, m') of captions, each a function of its caption alone.

        A caption whose embedding is not finite has a row that is not: it is to contribute nothing.

        Raises:
            DataError: a caption is none of the plan's conditions, and there is no encoder.
        """
        centred = self._raw(captions) - self.centre
        rows = clipped(centred, self.clip)
        if not self.intercept:
            return rows
        return np.concatenate([np.full((len(rows), 1), INTERCEPT * self.clip), rows], axis=1)

    def _raw(self, captions: list[str]) -> Array:
        """Features (n, m), neither centred nor clipped."""
        found = np.empty((len(captions), len(self.centre)))
        for row, caption in zip(found, captions, strict=True):
            place = self.known.get(caption, self.known.get(words_of(caption)))
            if place is not None:
                row[...] = self.table[place]
            elif self.encode is not None:
                row[...] = self.encode([caption])[0]
            else:  # the caption may be private: it stays unsaid
                raise DataError(
                    "a caption names no condition of the plan",
                    hint="captions follow private.captions.template, or are class names",
                )
        return found


def clipped(rows: Array, radius: float) -> Array:
    """Rows (n, m) of norm at most `radius`, the longer ones shortened; each looked at alone.

    >>> clipped(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0).round(6).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    norms = np.sqrt(np.square(rows).sum(axis=1))
    long = norms > radius  # False for NaN, which stays
    factor = np.divide(radius * _DOWN, norms, out=np.ones(len(rows)), where=long)
    short: Array = rows * factor[:, None]
    return short


def release_of(plan: Plan) -> CaptionRelease | None:
    """The plan's caption release; None where it has none."""
    moments = plan.stages.moments
    return None if moments is None else moments.captions


def fit_features(
    plan: Plan, release: CaptionRelease, public: list[str], encoder: SentenceEncoder | None
) -> tuple[CaptionFeatures, Array]:
    """Features with their public centre and radius, and the norms (k,) that it was read from.

    The public captions are, for one-hot conditions and slots, all fillings, each once: with
    their mean as centre all norms are equal, and Rtxt is that norm, exactly. For sentences they
    are the distinct ones of `public`, and Rtxt is `margin` times the `clip_quantile` of norms.

    Raises:
        PlanError: an embedding of another length than `width`; features that are all the same.
    """
    table = condition_table(plan, release, encoder)
    reference = table
    if encoder is not None:
        if encoder.dim != release.width:
            raise PlanError(
                f"stages.moments.captions.width is {release.width}, and the sentence encoder has "
                f"{encoder.dim} numbers",
                hint=f"write `width: {encoder.dim}`",
            )
        reference = encoder.embed(sorted(set(public)))
    centre = reference.mean(axis=0) if release.centre else np.zeros(reference.shape[1])
    norms: Array = np.sqrt(np.square(reference - centre).sum(axis=1))
    clip = float(norms.max()) * _UP
    if encoder is not None:
        clip = release.margin * float(np.quantile(norms, release.clip_quantile))
    if not 1e-9 < clip < math.inf:
        raise PlanError(
            "the public captions have one and the same feature vector, or one that is not finite",
            hint="declare captions that differ, or `centre: false` under stages.moments.captions",
        )
    encode = None if encoder is None else encoder.embed
    found = CaptionFeatures(
        release.features, centre, clip, has_constant(plan), table, _known(plan), encode
    )
    return found, norms


def condition_table(plan: Plan, release: CaptionRelease, encoder: SentenceEncoder | None) -> Array:
    """Features (Y, m) of the plan's conditions, neither centred nor clipped; none for free ones."""
    captions, classes = plan.private.captions, plan.private.classes
    if encoder is not None:
        texts = [] if isinstance(captions, FreeCaptions) else condition_captions(captions, classes)
        return encoder.embed(texts)
    if release.features == "slots" and isinstance(captions, Template):
        return slot_indicators(captions, classes)
    return np.eye(plan.private.conditions)


def slot_indicators(template: Template, classes: list[str]) -> Array:
    """One block of indicators a slot, (Y, m): m values in all, one 1 in each block.

    >>> two = Template(kind="template", template="{size} {class}", slots={"size": ["big", "wee"]})
    >>> slot_indicators(two, ["cat", "dog"])[1].tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    fillings = np.array(template.fillings(classes))
    blocks = [np.eye(len(v))[fillings[:, k]] for k, v in enumerate(template.values(classes))]
    return np.concatenate(blocks, axis=1)


def save_features(path: Path, features: CaptionFeatures, recipe: str, encoder: str) -> None:
    """Write features atomically, stamped public. `encoder`: SHA-256 of its folder, or empty."""
    arrays = {
        "centre": features.centre,
        "radius": np.array([features.clip]),
        "table": features.table,
    }
    facts = {"kind": features.kind, "encoder": encoder, "intercept": str(features.intercept)}
    save_tensors(path, arrays, {"format": FORMAT, "room": "public", "recipe": recipe, **facts})


def load_features(run: RunDir, plan: Plan) -> CaptionFeatures:
    """The run's caption features; for free captions with the encoder that they were made by.

    Raises:
        PlanError: the plan has no caption release.
        MissingError: `dpsynth pretrain` has not made them, or the encoder is gone.
        UsageError: the file or the encoder is not the one that the calibration names.
    """
    release = release_of(plan)
    if release is None:
        raise PlanError("the plan has no caption release", hint="declare stages.moments.captions")
    wanted, path = read_json(run.calibration).get(HASH_KEY), run.public / FEATURES
    if not path.is_file():
        raise MissingError(
            f"{FEATURES} is missing from {run.public.name}/",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    arrays, facts = load_tensors(path)
    if sha256_file(path) != wanted or facts.get("format") != FORMAT:
        raise _other("is not the file that the calibration names", run)
    shapes = {name: array.shape for name, array in arrays.items()}
    free = isinstance(plan.private.captions, FreeCaptions)
    rows, width = 0 if free else plan.private.conditions, shapes.get("centre", (0,))[0]
    if shapes != {"centre": (width,), "radius": (1,), "table": (rows, width)}:
        raise _other("does not fit the plan", run)
    if (facts["kind"], facts["intercept"]) != (release.features, str(has_constant(plan))):
        raise _other("does not fit the plan", run)
    encode = _encode(release, facts["encoder"], run) if free else None
    table = arrays["table"].astype(np.float64)
    centre, clip = arrays["centre"].astype(np.float64), float(arrays["radius"][0])
    return CaptionFeatures(
        release.features, centre, clip, has_constant(plan), table, _known(plan), encode
    )


def _known(plan: Plan) -> dict[str, int]:
    """The conditions by their captions, and by the words of these where no two share them."""
    if isinstance(plan.private.captions, FreeCaptions):
        return {}
    texts = condition_captions(plan.private.captions, plan.private.classes)
    counts = Counter(map(words_of, texts))
    alone = {words: n for n, words in enumerate(map(words_of, texts)) if counts[words] == 1}
    return alone | {text: number for number, text in enumerate(texts)}


def _encode(release: CaptionRelease, sha256: str, run: RunDir) -> Encode:
    if release.encoder is None:
        raise _other("needs an encoder", run)
    encoder = load_encoder(release.encoder)
    if encoder.sha256 != sha256:
        raise UsageError(
            "the sentence encoder is not the one that the run's features were made by",
            hint="put that folder back; a run that has spent nothing yet: "
            + typed("dpsynth", "pretrain", run.root),
        )
    return encoder.embed


def _other(why: str, run: RunDir) -> UsageError:
    return UsageError(f"{FEATURES} {why}", hint=typed("dpsynth", "pretrain", run.root))
