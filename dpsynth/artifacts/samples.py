"""Synthetic images on disk: an image folder that the ecosystem's loaders read as it is.

`metadata.csv` (`file_name`, `label`, `text`) stands beside `images/*.png`; `file_name` is relative
to the folder. `metadata.csv` is renamed into place last, so a folder that has one is whole. While
sampling runs, finished shards are listed in `.parts/`; a writer of the same origin goes on there.
A summary with the count, the classes, the origin and the digest of all that was written stands
beside the folder (`samples.json` for `samples/`). Coarse samples have their tokens beside them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsynth.artifacts.files import (
    read_json,
    sha256_bytes,
    sha256_file,
    write_atomic,
    write_json,
)
from dpsynth.artifacts.sample_parts import MARKER, PARTS, discard_parts, matches
from dpsynth.artifacts.sample_rows import (
    Images,
    Labels,
    checked,
    from_csv,
    inside,
    read_png,
    to_csv,
    write_pngs,
)
from dpsynth.artifacts.token_file import NAME as TOKENS
from dpsynth.artifacts.token_file import Ids, TokenFile, joined, save_tokens
from dpsynth.errors import DataError, MissingError, UsageError

FORMAT = "dpsynth-samples-1"
_HELD = 3 * 2**24  # numbers of images that are drawn at once: bounds memory where they are large
PLAIN = "plain"
"""What an augmenting plan's samples without augmentation are called: `samples-plain/`."""


class SamplesWriter:
    """Writes samples shard by shard; a second writer of the same `origin` goes on where one died.

    Args:
        folder: where `images/` and `metadata.csv` go; made if absent.
        classes: declared class names; labels index them.
        origin: what the samples are made of (model hash, method, guidance, ...), plain JSON. Shards
            left by another origin are discarded.
        stamp: PNG text fields of every image, such as `{"dpsynth": "synthetic"}`.
        tokenizer: SHA-256 of the tokenizer whose tokens are written beside the images; None for
            images alone.
    """

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str],
        *,
        origin: Mapping[str, Any] | None = None,
        stamp: Mapping[str, str] | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.classes = list(classes)
        self.origin = dict(origin or {})
        self.stamp = dict(stamp or {"dpsynth": "synthetic"})
        self._parts = folder / PARTS
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

    def add(
        self,
        images: Images,
        labels: Labels,
        texts: Sequence[str] | None = None,
        tokens: Ids | None = None,
    ) -> None:
        """Write one shard: images uint8 (n, H, W, C) or (n, H, W), labels (n,), texts n or None.

        tokens: int32 (n, t), where the writer was told of a tokenizer.

        Raises:
            UsageError: shapes or types do not fit, or a label is outside the declared classes.
        """
        images, labels = checked(images, labels, len(self.classes))
        names = [f"images/{self.written + i:07d}.png" for i in range(len(images))]
        captions = [self.classes[label] for label in labels] if texts is None else list(texts)
        if len(captions) != len(images):
            raise UsageError(f"{len(captions)} texts for {len(images)} images")
        self._add_tokens(tokens, len(images))
        write_pngs(self.folder, names, images, self.stamp)
        rows = [
            (name, self.classes[label], text)
            for name, label, text in zip(names, labels, captions, strict=True)
        ]
        write_atomic(self._parts / f"{self._shards:06d}.csv", to_csv(rows))
        self._rows += rows
        self._shards += 1

    def finish(self) -> Path:
        """Put `metadata.csv` into place, write the summary, drop `.parts/`; return the CSV."""
        path, content = self.folder / "metadata.csv", to_csv(self._rows)
        tokens = self._finish_tokens(sha256_bytes(content))
        write_atomic(path, content)
        summary = {
            "format": FORMAT,
            "count": self.written,
            "classes": self.classes,
            "origin": self.origin,
            "stamp": self.stamp,
            "metadata_sha256": sha256_file(path),
            "content_sha256": content_digest(self.folder),
            **tokens,
        }
        write_json(summary_path(self.folder), summary)
        discard_parts(self._parts)
        return path

    def _add_tokens(self, tokens: Ids | None, count: int) -> None:
        """Write a shard's tokens; its list of images, which comes after, makes it complete."""
        if (tokens is None) is not (self.tokenizer is None):
            raise UsageError("a shard came without its tokens, or with some that nothing explains")
        if tokens is not None and self.tokenizer is not None:
            if len(tokens) != count:
                raise UsageError(f"{len(tokens)} rows of tokens for {count} images")
            save_tokens(self._token_part(self._shards), TokenFile(tokens, self.tokenizer))

    def _finish_tokens(self, metadata: str) -> dict[str, str]:
        """Put `tokens.safetensors` into place; what the summary says of it."""
        if self.tokenizer is None:
            return {}
        parts = [self._token_part(shard) for shard in range(self._shards)]
        path = self.folder / TOKENS
        save_tokens(path, joined(parts, self.tokenizer, metadata))
        return {"tokens_sha256": sha256_file(path)}

    def _token_part(self, shard: int) -> Path:
        return self._parts / f"{shard:06d}.safetensors"

    def _open(self) -> None:
        """Take over the complete shards of the same origin, or clear what is left of another."""
        mark = {"classes": self.classes, "origin": self.origin, "stamp": self.stamp}
        if matches(self._parts, mark):
            while (part := self._parts / f"{self._shards:06d}.csv").exists():
                self._rows += [_as_tuple(row) for row in from_csv(part)]
                self._shards += 1
            return
        (self.folder / "metadata.csv").unlink(missing_ok=True)
        (self.folder / TOKENS).unlink(missing_ok=True)
        summary_path(self.folder).unlink(missing_ok=True)
        discard_parts(self._parts)
        for old in sorted((self.folder / "images").glob("*.png")):
            if old.stem.isdigit():
                old.unlink()
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        self._parts.mkdir(exist_ok=True)
        write_json(self._parts / MARKER, mark)


def shard_size(shape: tuple[int, int, int], most: int) -> int:
    """Images of a shard, which are held at once: `most`, or fewer of large ones (H, W, C).

    >>> shard_size((28, 28, 1), 500), shard_size((1024, 1024, 3), 500)
    (500, 16)
    """
    return max(1, min(most, _HELD // math.prod(shape)))


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
    first: int | None = None,
) -> tuple[Images, Labels]:
    """Read an image folder back: images uint8 (n, H, W, C) and labels (n,) into `classes`.

    `shape` (H, W, C) is what every image must have; None takes the first image's. `most`: only the
    first so many images of each label are opened. `first`: only those of so many classes are.

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
    rows = from_csv(path)
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
        if first is not None and index[row["label"]] >= first:
            continue
        labels.append(index[row["label"]])
        image = read_png(folder, row["file_name"], shape)
        shape = shape or (image.shape[0], image.shape[1], image.shape[2])
        images.append(image)
    if not images:  # none of the first classes
        return np.empty((0, *(shape or (1, 1, 1))), np.uint8), np.zeros(0, np.int64)
    return np.stack(images), np.array(labels, dtype=np.int64)


def summary_path(folder: Path) -> Path:
    """The summary beside a samples folder: `samples.json` for `samples/`."""
    return folder.with_name(folder.name + ".json")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished folder, or None while there is none that fits `metadata.csv`.

    Nor where tokens should lie beside the images and do not.

    A sampler compares its `origin` and `count` with what is asked for, and skips work done. Images
    are not looked at: `content_sha256` is the `content_digest` that they had when they were written
    (absent from summaries of older versions).
    """
    path, metadata = summary_path(folder), folder / "metadata.csv"
    if not path.exists() or not metadata.exists():
        return None
    summary = read_json(path)
    tokens = summary.get("tokens_sha256")
    if tokens is not None and not _has(folder / TOKENS, tokens):
        return None
    return summary if _has(metadata, summary.get("metadata_sha256")) else None


def content_digest(folder: Path) -> str:
    """SHA-256 of what a finished folder holds, from the SHA-256 of each of its files.

    Of `HASH  NAME` lines, `metadata.csv` first and then the images in its order: whoever has the
    hand-out's manifest can compute it again.

    Raises MissingError or DataError where the folder is not whole, or its list leads out of it.
    """
    path = folder / "metadata.csv"
    lines = [f"{sha256_file(path)}  {path.name}\n"]
    for row in from_csv(path):
        name = row["file_name"]
        lines.append(f"{sha256_file(inside(folder, name))}  {name}\n")
    return sha256_bytes("".join(lines).encode())


def discard_unfinished(folder: Path) -> None:
    """Forget the shards of an unfinished sampling, so that the next writer starts at zero."""
    discard_parts(folder / PARTS)


def _has(path: Path, digest: object) -> bool:
    return path.is_file() and sha256_file(path) == digest


def _as_tuple(row: Mapping[str, str]) -> tuple[str, str, str]:
    """A CSV row as (file_name, label, text)."""
    return row["file_name"], row["label"], row["text"]
