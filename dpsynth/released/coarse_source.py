"""Coarse images to complete: of a run, of a folder that a sampler wrote, or of any image folder.

The source is the user's to name, and never what a plan declares private, nor a curator's room.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.files import sha256_bytes, sha256_file
from dpsynth.artifacts.nonprivate import KEY, is_stamped, reference_stamps
from dpsynth.artifacts.rooms import LOCK_NAME, MANIFEST_NAME, in_curators_room
from dpsynth.artifacts.sample_parts import unfinished_origin
from dpsynth.artifacts.sample_rows import from_csv, read_png
from dpsynth.artifacts.samples import content_digest, read_summary, summary_path
from dpsynth.artifacts.token_file import NAME as TOKENS
from dpsynth.artifacts.token_file import Ids, load_tokens
from dpsynth.console import counted
from dpsynth.errors import DataError, MissingError, UsageError, typed
from dpsynth.planning.caption_rules import MOST_CAPTION, PUBLIC
from dpsynth.planning.source_kinds import FolderSource
from dpsynth.planning.sources import plan_file
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.public.private_places import meets_private
from dpsynth.readers import BadRecord, Record, UnreadableSourceError, open_source
from dpsynth.readers.class_names import classes_of
from dpsynth.readers.tree import open_tree

GIVEN = "dpsynth-coarse"
"""Stamp of images that were completed from coarse ones for which no run vouches."""
MOST_BYTES = 1 << 32
"""Largest foreign source, in bytes of its decoded images."""
HINT = "give a run, or an image folder or zip: metadata.csv beside pictures, or class subfolders"

_WARNINGS = ("dpsynth-unsafe", "dpsynth-demo", GIVEN)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LONGEST = 1000  # characters of a stamp

Images = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Coarse:
    """n coarse images.

    labels int64 (n,) index `classes`; texts (n,), empty where an image has no caption; images(a, b)
    gives rows a to b - 1, uint8 (b - a, h, w, C); sha256 of images, labels and captions; ids int32
    (n, t), of the tokenizer with that SHA-256, or None; origin and stamp are of the folder's own
    summary, empty where it has none.
    """

    path: Path
    sha256: str
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    texts: tuple[str, ...]
    images: Callable[[int, int], Images] = field(repr=False)
    ids: Ids | None = field(default=None, repr=False)
    tokenizer: str = ""
    origin: dict[str, Any] = field(default_factory=dict)
    stamp: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many images there are, n."""
        return len(self.labels)


def read_coarse(verified: VerifiedPlan, given: Path | None) -> Coarse:
    """The coarse samples of the run, or what lies at `given`.

    Raises:
        UsageError: a place that is private, curator-only, or no image folder or run.
        MissingError: nothing is there, or it was not drawn to the end.
        DataError: it is damaged, or was changed since it was written.
    """
    own = verified.run.released / "coarse"
    path = own if given is None else _folder_of(given)
    require_open(verified, path)
    hint = typed("dpsynth", "sample", verified.run.root)
    if not path.exists():
        if given is not None and path == given:
            raise MissingError(f"{given} is not there", hint=HINT)
        raise MissingError(f"there are no coarse samples at {path}", hint=hint)
    metadata = path / "metadata.csv"
    if unfinished_origin(path) is not None and not metadata.is_file():
        raise MissingError(f"{path} was not drawn to the end", hint=hint)
    if is_stamped(path):
        raise UsageError(
            f"{path} holds curator-only reference images, which are completed by no release",
            hint="dpsynth complete-wavelet RUN",
        )
    if metadata.is_file() and (summary_path(path).is_file() or (path / TOKENS).is_file()):
        return _samples(path, hint)
    if path == own:
        raise MissingError("the run has no whole coarse samples", hint=hint)
    return _any_images(path)


def require_open(verified: VerifiedPlan, path: Path, what: str = "--coarse") -> None:
    """Refuse (UsageError) a place that holds, or lies in, private records or a curator's room."""
    # Records that lie elsewhere by now (`--private`) may lie where the plan says, too.
    plans = (verified.plan, load_plan(plan_file(verified.run)))
    if any(meets_private(plan, path) for plan in plans):
        raise UsageError(
            f"{what} meets the private source: completion opens and writes nothing there",
            hint="name another folder",
        )
    if in_curators_room(path):
        raise UsageError(
            f"{what} lies in a curator's room, whose content is never handed out",
            hint="name another folder",
        )


def _folder_of(given: Path) -> Path:
    """A run or a hand-out stands for its coarse samples, else for its samples."""
    room = given / "released" if (given / "released").is_dir() else given
    if not (given / LOCK_NAME).is_file() and not (room / MANIFEST_NAME).is_file():
        return given
    coarse = room / "coarse"
    return coarse if coarse.is_dir() else room / "samples"


def _samples(path: Path, hint: str) -> Coarse:
    """A folder that a sampler wrote: images are opened when they are asked for."""
    summary = read_summary(path)
    _require_plain(path)
    digest = content_digest(path)
    if summary is None and summary_path(path).is_file():
        raise DataError(f"{path} was changed since it was drawn, or is not whole", hint=hint)
    if summary is not None and summary.get("content_sha256", digest) != digest:
        raise DataError(f"images of {path} were changed since they were drawn", hint=hint)
    rows = _rows(path, hint)
    names = [row["file_name"] for row in rows]
    classes = tuple(dict.fromkeys(row["label"] for row in rows))
    places = {name: place for place, name in enumerate(classes)}
    first = read_png(path, names[0], None)

    def images(start: int, stop: int) -> Images:
        return np.stack([read_png(path, name, _shape(first)) for name in names[start:stop]])

    ids, tokenizer = _tokens(path, len(rows))
    origin, stamp = _told(summary or {}, path)
    return Coarse(
        path,
        digest,
        np.array([places[row["label"]] for row in rows], np.int64),
        classes,
        tuple(row["text"] for row in rows),
        images,
        ids,
        tokenizer,
        origin,
        stamp,
    )


def _rows(path: Path, hint: str) -> list[dict[str, str]]:
    """The rows of a folder's table, whose texts are captions and names as readers let them pass."""
    rows = from_csv(path / "metadata.csv")
    if not rows:
        raise DataError(f"{path} lists no image", hint=hint)
    for number, row in enumerate(rows, start=1):
        for key in ("label", "text"):
            if len(row[key]) > MOST_CAPTION or _CONTROL.search(row[key]):
                raise DataError(
                    f"{path}: the {key} of image {number} is longer than {MOST_CAPTION} "
                    "characters, or has control characters",
                    hint="mend or remove it",
                )
    return rows


def _require_plain(path: Path) -> None:
    """Refuse (DataError) a table or tokens that are links: they may lead to what is private."""
    for name in ("metadata.csv", TOKENS):
        if (path / name).is_symlink():
            raise DataError(f"{name} in {path} is a symlink", hint="put the file itself there")


def _told(summary: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Origin and stamp of a summary, which may be anybody's. Warnings of a stamp are carried over.

    Raises DataError for what no sampler writes, and UsageError for a curator's stamp.
    """
    origin, stamp = summary.get("origin", {}), summary.get("stamp", {})
    if not isinstance(origin, dict) or not isinstance(stamp, dict):
        raise DataError(f"{path.name}.json holds no origin or stamp that a sampler writes")
    if KEY in stamp or stamp.get("dpsynth") == reference_stamps("nonprivate")["dpsynth"]:
        raise UsageError(
            f"{path} holds curator-only images, which are completed by no release",
            hint="dpsynth complete-wavelet RUN",
        )
    known = {key: stamp[key] for key in _WARNINGS if key in stamp}
    if not all(isinstance(text, str) and len(text) <= _LONGEST for text in known.values()):
        raise DataError(f"{path.name}.json holds a stamp that no sampler writes")
    return origin, known


def _tokens(path: Path, count: int) -> tuple[Ids | None, str]:
    """The tokens beside images, and their tokenizer; None where there are none."""
    if not (path / TOKENS).is_file():
        return None, ""
    found = load_tokens(path / TOKENS)
    listed = sha256_file(path / "metadata.csv")
    if len(found.ids) != count or found.metadata != listed:
        raise DataError(
            f"{TOKENS} in {path} does not go by the metadata.csv beside it",
            hint=f"remove {TOKENS}, and the images are read instead",
        )
    return found.ids, found.tokenizer


def _any_images(path: Path) -> Coarse:
    """Any image folder or zip, read whole."""
    try:
        with open_tree(path) as tree:
            inside = [name for name in tree.listing.files if name.endswith(LOCK_NAME)]
            classes = () if inside else classes_of(tree, "--coarse")
        if inside:
            raise UsageError("--coarse is a folder of runs, not of images", hint=HINT)
        records = _records(path, classes)
    except UnreadableSourceError as error:
        raise DataError(f"{path} cannot be read as images: {error.detail}", hint=HINT) from None
    shapes = {record.image.shape for record in records}
    if len(shapes) != 1:
        raise DataError(f"{path} has images of {counted(len(shapes), 'shape')}, expected one")
    whole = np.stack([record.image for record in records])
    labels = np.array([max(0, record.label) for record in records], np.int64)
    texts = tuple(record.text for record in records)
    said = repr((whole.shape, labels.tolist(), classes, texts)).encode()
    return Coarse(
        path,
        sha256_bytes(said + whole.tobytes()),
        labels if classes else np.zeros_like(labels),
        classes or ("",),  # an empty label is none
        texts,
        lambda start, stop: whole[start:stop],
    )


def _records(path: Path, classes: tuple[str, ...]) -> list[Record]:
    source = FolderSource(kind="folder", path=path)
    records, size = list[Record](), 0
    for item in open_source(source, classes or None, None, PUBLIC):
        if isinstance(item, BadRecord):
            raise DataError(f"{path}: {item.name}: {item.reason}", hint="mend or remove it")
        records.append(item)
        size += item.image.nbytes
        if size > MOST_BYTES:
            raise DataError(f"images of {path} take more than {MOST_BYTES >> 30} GiB of memory")
    if not records:
        raise DataError(f"{path} holds no image", hint=HINT)
    return records


def _shape(image: Images) -> tuple[int, int, int]:
    return image.shape[0], image.shape[1], image.shape[2]
