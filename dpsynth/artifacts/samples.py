"""Synthetic images on disk: an image folder that the ecosystem's loaders read as it is.

`metadata.csv` (`file_name`, `label`, `text`) stands beside `images/*.png`; `file_name` is relative
to the folder. `metadata.csv` is renamed into place last, so a folder that has one is whole. While
sampling runs, finished shards are listed in `.parts/`; a writer of the same origin goes on there.
A summary with the count, the classes, the origin and the digest of all that was written stands
beside the folder (`samples.json` for `samples/`).
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpsynth.artifacts.files import (
    read_json,
    sha256_bytes,
    sha256_file,
    write_atomic,
    write_json,
)
from dpsynth.errors import DataError, DpsynthError, MissingError, UsageError

FORMAT = "dpsynth-samples-1"
COLUMNS = ("file_name", "label", "text")
PLAIN = "plain"
"""What an augmenting plan's samples without augmentation are called: `samples-plain/`."""

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class SamplesWriter:
    """Writes samples shard by shard; a second writer of the same `origin` goes on where one died.

    Args:
        folder: where `images/` and `metadata.csv` go; made if absent.
        classes: declared class names; labels index them.
        origin: what the samples are made of (model hash, method, guidance, ...), plain JSON. Shards
            left by another origin are discarded.
        stamp: PNG text fields of every image, such as `{"dpsynth": "synthetic"}`.
    """

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str],
        *,
        origin: Mapping[str, Any] | None = None,
        stamp: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.classes = list(classes)
        self.origin = dict(origin or {})
        self.stamp = dict(stamp or {"dpsynth": "synthetic"})
        self._parts = folder / ".parts"
        self._rows: list[tuple[str, str, str]] = []
        self._shards = 0
        self._open()

    @property
    def written(self) -> int:
        """Images in complete shards: the next `add` starts at this number."""
        return len(self._rows)

    @property
    def shards(self) -> int:
        """Complete shards so far, those of an earlier process included."""
        return self._shards

    def add(self, images: Images, labels: Labels, texts: Sequence[str] | None = None) -> None:
        """Write one shard: images uint8 (n, H, W, C) or (n, H, W), labels (n,), texts n or None.

        Raises:
            UsageError: shapes or types do not fit, or a label is outside the declared classes.
        """
        images, labels = _checked(images, labels, len(self.classes))
        names = [f"images/{self.written + i:07d}.png" for i in range(len(images))]
        captions = [self.classes[label] for label in labels] if texts is None else list(texts)
        if len(captions) != len(images):
            raise UsageError(f"{len(captions)} texts for {len(images)} images")
        _write_pngs(self.folder, names, images, self.stamp)
        rows = [
            (name, self.classes[label], text)
            for name, label, text in zip(names, labels, captions, strict=True)
        ]
        write_atomic(self._parts / f"{self._shards:06d}.csv", _to_csv(rows))
        self._rows += rows
        self._shards += 1

    def finish(self) -> Path:
        """Put `metadata.csv` into place, write the summary, drop `.parts/`; return the CSV."""
        path = self.folder / "metadata.csv"
        write_atomic(path, _to_csv(self._rows))
        summary = {
            "format": FORMAT,
            "count": self.written,
            "classes": self.classes,
            "origin": self.origin,
            "stamp": self.stamp,
            "metadata_sha256": sha256_file(path),
            "content_sha256": content_digest(self.folder),
        }
        write_json(summary_path(self.folder), summary)
        _discard_parts(self._parts)
        return path

    def _open(self) -> None:
        """Take over the complete shards of the same origin, or clear what is left of another."""
        mark = {"classes": self.classes, "origin": self.origin, "stamp": self.stamp}
        marker = self._parts / "origin.json"
        if _matches(marker, mark):
            while (part := self._parts / f"{self._shards:06d}.csv").exists():
                self._rows += [_as_tuple(row) for row in _from_csv(part)]
                self._shards += 1
            return
        (self.folder / "metadata.csv").unlink(missing_ok=True)
        summary_path(self.folder).unlink(missing_ok=True)
        _discard_parts(self._parts)
        for old in sorted((self.folder / "images").glob("*.png")):
            if old.stem.isdigit():
                old.unlink()
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        self._parts.mkdir(exist_ok=True)
        write_json(marker, mark)


def write_samples(
    folder: Path,
    images: Images,
    labels: Labels,
    classes: Sequence[str],
    *,
    texts: Sequence[str] | None = None,
    origin: Mapping[str, Any] | None = None,
    stamp: Mapping[str, str] | None = None,
) -> Path:
    """Write all samples at once; arguments as of `SamplesWriter` and `SamplesWriter.add`.

    Returns the path of `metadata.csv`. Whatever samples the folder held are replaced.
    """
    discard_unfinished(folder)
    writer = SamplesWriter(folder, classes, origin=origin, stamp=stamp)
    writer.add(images, labels, texts)
    return writer.finish()


def read_samples(
    folder: Path,
    classes: Sequence[str],
    shape: tuple[int, int, int] | None = None,
    *,
    most: int | None = None,
) -> tuple[Images, Labels]:
    """Read an image folder back: images uint8 (n, H, W, C) and labels (n,) into `classes`.

    `shape` (H, W, C) is what every image must have; None takes the first image's. `most`: only the
    first so many images of each label are opened.

    Raises:
        MissingError: no `metadata.csv`: nothing was sampled, or sampling was cut short.
        DataError: a damaged, foreign or missing image, an undeclared label, another shape.
    """
    path = folder / "metadata.csv"
    if not path.is_file():
        raise MissingError(
            f"no complete samples in {folder}: metadata.csv is missing",
            hint="dpsynth sample RUN -n 10000",
        )
    index = {name: i for i, name in enumerate(classes)}
    rows = _from_csv(path)
    if not rows:
        raise DataError(f"{path} lists no samples", hint="dpsynth sample RUN -n 10000")
    images, labels = [], []
    seen = dict.fromkeys(index, 0)
    for i, row in enumerate(rows):
        if row["label"] not in index:
            raise DataError(
                f"{path}, line {i + 2}: label {row['label']!r} is not declared in the plan",
                hint=f"declared classes: {', '.join(classes)}",
            )
        seen[row["label"]] += 1
        if most is not None and seen[row["label"]] > most:
            continue
        labels.append(index[row["label"]])
        image = _read_png(folder, row["file_name"], shape)
        shape = shape or (image.shape[0], image.shape[1], image.shape[2])
        images.append(image)
    return np.stack(images), np.array(labels, dtype=np.int64)


def summary_path(folder: Path) -> Path:
    """The summary beside a samples folder: `samples.json` for `samples/`."""
    return folder.with_name(folder.name + ".json")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished folder, or None while there is none that fits `metadata.csv`.

    A sampler compares its `origin` and `count` with what is asked for, and skips work done. Images
    are not looked at: `content_sha256` is the `content_digest` that they had when they were written
    (absent from summaries of older versions).
    """
    path, metadata = summary_path(folder), folder / "metadata.csv"
    if not path.exists() or not metadata.exists():
        return None
    summary = read_json(path)
    return summary if summary.get("metadata_sha256") == sha256_file(metadata) else None


def content_digest(folder: Path) -> str:
    """SHA-256 of what a finished folder holds, from the SHA-256 of each of its files.

    Of `HASH  NAME` lines, `metadata.csv` first and then the images in its order: whoever has the
    hand-out's manifest can compute it again.

    Raises MissingError or DataError where the folder is not whole.
    """
    path = folder / "metadata.csv"
    lines = [f"{sha256_file(path)}  {path.name}\n"]
    for row in _from_csv(path):
        lines.append(f"{sha256_file(folder / row['file_name'])}  {row['file_name']}\n")
    return sha256_bytes("".join(lines).encode())


def discard_unfinished(folder: Path) -> None:
    """Forget the shards of an unfinished sampling, so that the next writer starts at zero."""
    _discard_parts(folder / ".parts")


def _as_tuple(row: Mapping[str, str]) -> tuple[str, str, str]:
    """A CSV row as (file_name, label, text)."""
    return row["file_name"], row["label"], row["text"]


def _matches(marker: Path, mark: Mapping[str, Any]) -> bool:
    try:
        return marker.exists() and read_json(marker) == mark
    except DpsynthError:  # a damaged marker: start over
        return False


def _discard_parts(parts: Path) -> None:
    if parts.is_dir():
        # The marker goes first: without it, what is left counts as nobody's.
        (parts / "origin.json").unlink(missing_ok=True)
        for part in sorted(parts.iterdir()):
            part.unlink()
        parts.rmdir()


def _checked(images: Images, labels: Labels, classes: int) -> tuple[Images, Labels]:
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise UsageError(
            f"images are {images.dtype} {images.shape}, expected uint8 (n, H, W, 1 or 3)"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise UsageError(
            f"labels are {labels.dtype} {labels.shape}, expected integers ({len(images)},)"
        )
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise UsageError(f"labels lie outside the {classes} declared classes")
    return images, labels.astype(np.int64)


def _write_pngs(
    folder: Path, names: Sequence[str], images: Images, stamp: Mapping[str, str]
) -> None:
    from dpsynth.artifacts.sheet import encode_png

    for name, image in zip(names, images, strict=True):
        (folder / name).write_bytes(encode_png(image, stamp))


def _read_png(folder: Path, name: str, shape: tuple[int, int, int] | None) -> Images:
    """One image (H, W, C); size and mode are checked before a pixel is decoded."""
    from PIL import Image

    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"metadata.csv names a file outside {folder}: {name!r}")
    try:
        with Image.open(path) as image:
            channels = {"L": 1, "RGB": 3}.get(image.mode)
            found = (image.height, image.width, channels)
            if channels is None or (shape is not None and found != shape):
                raise DataError(
                    f"{path} is {image.height}x{image.width} {image.mode}, expected "
                    + ("L or RGB" if shape is None else "x".join(map(str, shape)))
                )
            pixels = np.asarray(image, dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"metadata.csv names {name!r}, which is missing in {folder}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is no readable image: {error}") from None
    return pixels.reshape(pixels.shape[0], pixels.shape[1], -1)


def _to_csv(rows: Sequence[tuple[str, str, str]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    return out.getvalue().encode()


def _from_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream, strict=True)
            rows = list(reader)
            header = tuple(reader.fieldnames or ())
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no readable CSV: {error}") from None
    if header != COLUMNS or any(None in row or None in row.values() for row in rows):
        raise DataError(
            f"{path} has columns {', '.join(header)} or a broken row, expected {', '.join(COLUMNS)}"
        )
    return rows
