"""Attribute accuracy: does an image show what its caption asked for, slot by slot?

For plans with a caption template ("a {stroke} {class} with a dot {quadrant}"): one classifier a
slot, trained on real training records and their captions (StraightDP, section C and Table 4:
"per-attribute conditioning accuracy"). Curator-only.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.assess.features import lenet_space
from dpsynth.assess.probes import majority
from dpsynth.errors import DataError, MissingError, UsageError
from dpsynth.models.lenet import Images, Labels, predict
from dpsynth.models.seeding import generator
from dpsynth.planning.caption_rules import caption_rule
from dpsynth.planning.captions import Template
from dpsynth.vault import Units

ALL = "all slots"
"""What all slots together are called: an image counts where every slot is right."""
ASIDE = 10
"""Without captioned held-out records, one training record in so many is kept for the ceiling."""
PROTOCOL = (
    "one LeNet a slot of the caption template, by the probe's protocol, on real training records; "
    "ceiling: held-out records and their own captions (where these have none, a tenth of the "
    "training records, which is then not trained on); floor: the answer that is right most often, "
    "whatever the image shows"
)


class Captioned(NamedTuple):
    """Images uint8 (n, H, W, C) and the caption of each; no caption at all where there are none."""

    images: Images
    captions: Sequence[str]


@dataclass(frozen=True, eq=False)
class Attribute:
    """One slot, or all of them together (`ALL`).

    Attributes:
        synthetic: share of samples that show what their caption asked for.
        ceiling: the classifier's accuracy on real records that it was not trained on.
        floor: what the best constant answer scores on the samples.
        hits: of each sample (n,), whether it does.
        by_value: value of the slot to the share of the samples that asked for it; None for none.
        n_ceiling: records behind the ceiling.
    """

    synthetic: float
    ceiling: float
    floor: float
    hits: NDArray[np.bool_]
    by_value: dict[str, float | None]
    n_ceiling: int

    def to_json(self) -> dict[str, Any]:
        """Plain values of all but `hits`."""
        return {
            "synthetic": self.synthetic,
            "ceiling": self.ceiling,
            "floor": self.floor,
            "by_value": dict(self.by_value),
            "n": {"synthetic": len(self.hits), "ceiling": self.n_ceiling},
        }


def attribute_accuracies(
    samples: Captioned,
    train: Captioned,
    held_out: Captioned | None,
    template: Template,
    classes: Sequence[str],
    *,
    steps: int,
    cache: Path | None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Attribute]:
    """Train a classifier for each slot, and ask whether the samples show their captions.

    Args:
        samples: images with the captions that they were drawn for.
        train: real training records.
        held_out: real records that are not trained on; None, or without captions: see `PROTOCOL`.
        template: the plan's `private.captions`.
        classes: the plan's classes, values of the slot `class`.
        steps: optimiser steps of each classifier, from declared numbers.
        cache: folder in the curator's room; None keeps nothing.
        progress: called with 1 after each step, `steps` times the number of slots.

    Returns:
        The answer of each slot in the template's order, and of `ALL` where there are several.

    Raises:
        DataError: a caption that is no filling of the template, or a side without records.
    """
    asked = slot_values(samples.captions, template, classes)
    train, real = _sides(train, held_out)
    truth, right = (slot_values(side.captions, template, classes) for side in (train, real))
    _require((samples, asked), (train, truth), (real, right))
    hits, known = list[NDArray[np.bool_]](), list[NDArray[np.bool_]]()
    found = dict[str, Attribute]()
    slots = zip(template.names, template.values(list(classes)), strict=True)
    for slot, (name, values) in enumerate(slots):
        truths = np.ascontiguousarray(truth[:, slot])
        _, net = lenet_space(
            train.images, truths, len(values), steps=steps, cache=cache, progress=progress
        )
        hits.append(predict(net, samples.images) == asked[:, slot])
        known.append(predict(net, real.images) == right[:, slot])
        floor = majority(asked[:, slot], len(values))
        by_value = _by_value(hits[-1], asked[:, slot], values)
        found[name] = _attribute(hits[-1], known[-1], floor, by_value)
    if len(hits) > 1:
        _, counts = np.unique(asked, axis=0, return_counts=True)
        floor = float(counts.max() / len(asked))
        whole, real_whole = (np.logical_and.reduce(one) for one in (hits, known))
        found[ALL] = _attribute(whole, real_whole, floor, {})
    return found


def slot_values(captions: Sequence[str], template: Template, classes: Sequence[str]) -> Labels:
    """Place of each slot's value in each caption, int64 (n, slots), slots in the template's order.

    Raises:
        DataError: captions that are no filling of the template; neither which nor how many is told.

    >>> form = Template(kind="template", template="a {size} {class}",
    ...     slots={"size": ["big", "small"]})
    >>> slot_values(["A small cat"], form, ["dog", "cat"]).tolist()
    [[1, 1]]
    """
    rule = caption_rule(template, classes)
    fillings = np.array(template.fillings(list(classes)), np.int64)
    if rule is None:
        raise UsageError("attributes are of plans with a caption template")
    known = {text: rule.condition(text) for text in set(captions)}
    places = [known[text] for text in captions]
    fitting = [place for place in places if place is not None]
    if len(fitting) < len(places):  # how many, and of how many, may be private
        raise DataError(
            "there are captions that are no filling of the plan's template",
            hint="dpsynth check RUN",
        )
    return fillings[np.array(fitting, np.int64)]


def drawn_for(folder: Path) -> list[str]:
    """The caption of each sample in a finished folder, in the order of its images.

    Raises:
        MissingError: there is no such folder of samples, or it is not finished.
    """
    path = folder / "metadata.csv"
    if not path.is_file():
        raise MissingError(f"no complete samples in {folder}", hint="dpsynth sample RUN -n 10000")
    with path.open(newline="", encoding="utf-8") as file:
        return [row["text"] for row in csv.DictReader(file)]


def captioned_records(units: Units) -> Captioned:
    """All records on one side of the split with their captions; none where the source has none."""
    shape = (0, units.image.height, units.image.width, units.image.channels)
    images, captions = [np.empty(shape, np.uint8)], list[str]()
    for block in units.blocks():
        images.append(block.images)
        captions += block.texts or ()
    return Captioned(np.concatenate(images), captions)


def _sides(train: Captioned, held_out: Captioned | None) -> tuple[Captioned, Captioned]:
    """What is trained on, and the captioned records of the ceiling."""
    if held_out is not None and len(held_out.captions):
        return train, held_out
    order = torch.randperm(len(train.captions), generator=generator(0)).numpy()
    aside, kept = np.split(order, [len(order) // ASIDE])
    one, other = (
        Captioned(train.images[part], [train.captions[i] for i in part.tolist()])
        for part in (kept, aside)
    )
    return one, other


def _require(*sides: tuple[Captioned, Labels]) -> None:
    for found, values in sides:
        if not len(values) or len(found.images) != len(values):
            raise DataError(
                "attribute accuracies need samples and real records on both sides, each with a "
                "caption; a side is empty or lacks some"
            )


def _attribute(
    hits: NDArray[np.bool_],
    known: NDArray[np.bool_],
    floor: float,
    by_value: dict[str, float | None],
) -> Attribute:
    return Attribute(float(hits.mean()), float(known.mean()), floor, hits, by_value, len(known))


def _by_value(
    hits: NDArray[np.bool_], asked: Labels, values: Sequence[str]
) -> dict[str, float | None]:
    """Share of hits among the samples that asked for each value."""
    shares = dict[str, float | None]()
    for place, value in enumerate(values):
        mine = asked == place
        shares[value] = float(hits[mine].mean()) if mine.any() else None
    return shares
