"""Canaries: images of the plan's shape that are planted in an audit, each by a coin of its own.

Patterns are worst cases for the moment release: within a class their codes point in nearly
orthogonal directions and lie on the clip's ball, so that each shows beside the others, and none
looks like a record. Public canaries are images of the plan's public sources under labels that
they do not have.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.audit.worlds import Array, Mask, Pair
from dpsynth.errors import UsageError
from dpsynth.planning.captions import Template
from dpsynth.planning.schema import HashHeldOut, Plan
from dpsynth.private.encoding import UnitCodes, encoded
from dpsynth.private.noise import NoiseSource
from dpsynth.public.representation import Representation
from dpsynth.public.sources import read_public
from dpsynth.vault import Record
from dpsynth.vault.split import is_held_out

CanaryKind = Literal["patterns", "public"]
CANARIES = 200
LEAST, MOST = 50, 2_000
_SCALES = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Lengths of the code that a pattern is drawn of, in clip radii: pixels are cut to bytes, which
shortens it. The first whose pattern reaches the ball's surface is taken."""
_NUDGES = 10_000


@dataclass(frozen=True)
class ListedUnits:
    """Privacy units held in memory, in order. `most` as of `vault.PrivacyUnits`."""

    units: tuple[tuple[Record, ...], ...]
    most: int | None = None

    def records(self) -> Iterator[list[Record]]:
        """The units."""
        return (list(unit) for unit in self.units)


def mark(image: NDArray[np.uint8]) -> bytes:
    """What tells images of one shape apart: SHA-256 of the pixels."""
    return hashlib.sha256(image.tobytes()).digest()


def fair_coins(count: int) -> Mask:
    """`count` independent fair coins (count,), fresh from the operating system at every call."""
    return NoiseSource().coins(count, 0.5)


def draw_canaries(
    plan: Plan,
    space: Representation,
    count: int,
    kind: CanaryKind,
    held_out: frozenset[bytes],
    *,
    run: RunDir | None = None,
) -> Pair:
    """Images (m, H, W, C) and labels (m,) of the plan's conditions, in turn; all different.

    No canary is a held-out record, nor would it be held out by the plan's own rule.

    Args:
        plan: as audited.
        space: what moments are released in; patterns are drawn of its codes.
        count: m, from 50 to 2,000.
        kind: "patterns" or "public".
        held_out: `mark` of every held-out image.
        run: whose public room has the own samples of a frozen prior, see `read_public`.

    Raises:
        UsageError: a count out of range, or fewer public images than that.
    """
    if not LEAST <= count <= MOST:
        raise UsageError(
            f"{count} canaries were asked for, expected {LEAST} to {MOST}", hint="--canaries 200"
        )
    labels = np.arange(count, dtype=np.int64) % plan.private.conditions
    images = patterns(space, labels) if kind == "patterns" else _public(plan, count, run)
    return _apart(plan, images, labels, held_out), labels


def patterns(space: Representation, labels: NDArray[np.int64], seed: int = 0) -> NDArray[np.uint8]:
    """Images whose codes are about orthogonal within a class, and on the clip's surface."""
    wanted = _directions(labels, space.dim, seed) * space.radius
    best = space.decode(torch.from_numpy(wanted * _SCALES[0]))
    reached = _norms(space, best)
    for scale in _SCALES[1:]:
        images = space.decode(torch.from_numpy(wanted * scale))
        norms = _norms(space, images)
        better = (reached < space.radius) & (norms > reached)
        best[better], reached[better] = images[better], norms[better]
    return best


def canary_codes(
    space: Representation, images: NDArray[np.uint8], labels: NDArray[np.int64], classes: int
) -> UnitCodes:
    """Codes of all canaries as the mechanism quantises and clips them, one unit each, in order.

    Raises UsageError where a code is not finite: such a canary would contribute nothing.
    """
    units = ListedUnits(
        tuple((Record(i, y),) for i, y in zip(images, labels.tolist(), strict=True))
    )
    chunks = list(encoded(units, space, classes))
    codes = np.concatenate([chunk.codes for chunk in chunks])
    found = np.concatenate([chunk.labels for chunk in chunks])
    if len(codes) != len(labels):
        raise UsageError("a canary has no finite code in this representation")
    return UnitCodes(codes, found)


def _directions(labels: NDArray[np.int64], dim: int, seed: int) -> Array:
    """Unit vectors (m, d); those of a class are orthogonal, up to d of them."""
    source = np.random.default_rng(seed)
    found = np.empty((len(labels), dim))
    for label in np.unique(labels).tolist():
        mine = np.flatnonzero(labels == label)
        for start in range(0, len(mine), dim):
            part = mine[start : start + dim]
            turned, _ = np.linalg.qr(source.normal(size=(dim, dim)))
            found[part] = turned[: len(part)]
    return found


def _norms(space: Representation, images: NDArray[np.uint8]) -> Array:
    found: Array = np.linalg.norm(space.encode_exact_many(images), axis=1)
    return found


def _public(plan: Plan, count: int, run: RunDir | None) -> NDArray[np.uint8]:
    """Public images without repetition, drawn by a public seed."""
    public = read_public(plan, run).images
    order = np.random.default_rng(plan.public_seed).permutation(len(public))
    chosen, seen = list[int](), set[bytes]()
    for place in order.tolist():
        found = mark(public[place])
        if found not in seen:
            seen.add(found)
            chosen.append(place)
        if len(chosen) == count:
            return np.ascontiguousarray(public[np.array(chosen)])
    raise UsageError(
        f"the public sources hold {len(chosen)} different images, and {count} canaries were asked "
        "for",
        hint="--canaries with a smaller number, or canaries of patterns",
    )


def _apart(
    plan: Plan, images: NDArray[np.uint8], labels: NDArray[np.int64], held_out: frozenset[bytes]
) -> NDArray[np.uint8]:
    """The same images, one pixel changed a little wherever one repeats or would be held out."""
    rule, private = plan.private.held_out, plan.private
    template = private.captions if isinstance(private.captions, Template) else None
    texts = [""] * private.conditions
    owners = list(range(private.conditions))
    if template is not None:
        texts, owners = template.captions(private.classes), template.owners(private.classes)
    seen = set(held_out)
    apart = images.copy()
    for place, label in enumerate(labels.tolist()):
        source = np.random.default_rng([plan.public_seed, place])
        for _ in range(_NUDGES):
            image = apart[place]
            record = Record(image, owners[label], text=texts[label])
            out = isinstance(rule, HashHeldOut) and is_held_out(record, rule)
            if mark(image) not in seen and not out:
                break
            at = int(source.integers(image.size))
            image.reshape(-1)[at] ^= 1
        else:
            raise UsageError(
                "no canary could be found that the plan does not hold out",
                hint="lower private.held_out.fraction",
            )
        seen.add(mark(apart[place]))
    return apart
