"""Which records are held out: a rule that looks at one record, or at one unit's name, alone."""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from dpsynth.planning.schema import HashHeldOut
from dpsynth.readers import Record

Mask = NDArray[np.bool_]


def is_held_out(record: Record, rule: HashHeldOut) -> bool:
    """Whether the salted hash of the record's own content falls below the declared fraction.

    Neither position nor any other record enters, so that adding or removing one record never
    moves another across the split, and add/remove adjacency holds on each side of it.
    """
    return _falls_below(content_hash(record, rule.salt), rule)


def is_unit_held_out(name: str, rule: HashHeldOut) -> bool:
    """Whether the salted hash of a unit's name falls below the declared fraction.

    All records of a unit lie on one side, whatever they are and however many.
    """
    salt = hashlib.sha256(b"unit" + rule.salt.encode()).digest()
    return _falls_below(hashlib.sha256(salt + name.encode("utf-8", "surrogatepass")).digest(), rule)


def _falls_below(digest: bytes, rule: HashHeldOut) -> bool:
    return int.from_bytes(digest) < int(Fraction(rule.fraction) * 2**256)


def held_out_rows(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    rule: HashHeldOut,
    texts: tuple[str, ...] | None = None,
) -> Mask:
    """`is_held_out` of each of the records images (n, H, W, C), labels and texts (n,): (n,)."""
    most = int(Fraction(rule.fraction) * 2**256).to_bytes(33)
    hashes = content_hashes(images, labels, rule.salt, texts)
    return np.fromiter((b"\0" + found < most for found in hashes), np.bool_, len(labels))


def content_hashes(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    salt: str,
    texts: tuple[str, ...] | None = None,
) -> Iterator[bytes]:
    """`content_hash` of each of the records images (n, H, W, C), labels and texts (n,)."""
    salted, shape = hashlib.sha256(salt.encode()).digest(), "/".join(map(str, images.shape[1:]))
    captions = repeat("", len(images)) if texts is None else texts
    for image, label, text in zip(images, labels.tolist(), captions, strict=True):
        head = f"{label}/{shape}".encode()
        yield hashlib.sha256(salted + head + b"\0" + image.tobytes() + text.encode()).digest()


def content_hash(record: Record, salt: str) -> bytes:
    """SHA-256 of salt, label, shape, pixels and caption, each of unambiguous extent.

    The shape tells where the pixels end: what follows them is the caption.
    """
    head = "/".join(map(str, (record.label, *record.image.shape)))
    return hashlib.sha256(
        hashlib.sha256(salt.encode()).digest()
        + head.encode()
        + b"\0"
        + record.image.tobytes()
        + record.text.encode()
    ).digest()
