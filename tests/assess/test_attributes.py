"""Attribute accuracies: real digits with a tone and a dot, as their captions say or not."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpsynth.artifacts.samples import write_samples
from dpsynth.assess.attributes import (
    ALL,
    Captioned,
    attribute_accuracies,
    captioned_records,
    drawn_for,
    slot_values,
)
from dpsynth.errors import DataError, MissingError
from dpsynth.planning.captions import Template
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.vault import open_private

CLASSES = [str(i) for i in range(10)]
SIDES, TONES = ["left", "right"], ["bright", "dim"]
FORM = Template(
    kind="template",
    template="a {tone} {class} with a dot {side}",
    slots={"tone": TONES, "side": SIDES},
)
PLAN = """
version: 1
name: captions
budget: {epsilon: 3, delta: 1e-5}
private:
  source: {kind: npz, path: digits.npz, captions: captions}
  capacity: 1400
  image: {height: 28, width: 28}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {by: hash, fraction: 0.3}
  captions:
    kind: template
    template: "a {tone} {class} with a dot {side}"
    slots: {tone: [bright, dim], side: [left, right]}
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 8}
stages: {moments: {}}
"""


def composed() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Real digits of 28x28, dim or bright, with a dot on the left or on the right."""
    data, rng = load_digits(), np.random.default_rng(0)
    images = np.repeat(np.repeat(data.images * 12, 3, axis=1), 3, axis=2).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    tones, sides = rng.integers(0, 2, (2, len(images)))
    images = np.where((tones == 1)[:, None, None], images // 3, images)
    images[sides == 0, :4, :4] = 255
    images[sides == 1, :4, -4:] = 255
    facts = zip(tones, data.target, sides, strict=True)
    texts = [f"a {TONES[t]} {y} with a dot {SIDES[s]}" for t, y, s in facts]
    return images[..., None], data.target.astype(np.int64), texts


IMAGES, LABELS, TEXTS = composed()


def part(start: int, end: int) -> Captioned:
    return Captioned(IMAGES[start:end], TEXTS[start:end])


def test_real_records_reach_the_ceiling_and_wrong_captions_the_floor(tmp_path: Path) -> None:
    samples = part(900, 1200)
    # Every caption's side is turned round: that slot alone is wrong.
    turned = [
        text.removesuffix(side) + other
        for text in samples.captions
        for side, other in (("left", "right"), ("right", "left"))
        if text.endswith(f" {side}")
    ]
    steps: list[int] = []
    settings = {"template": FORM, "classes": CLASSES, "steps": 80, "cache": tmp_path}
    found = attribute_accuracies(
        samples, part(0, 900), part(1200, 1797), **settings, progress=steps.append
    )
    assert list(found) == ["tone", "class", "side", ALL] and sum(steps) == 240
    for name in ("tone", "side"):
        assert found[name].ceiling > 0.95 and found[name].synthetic > 0.95
        assert 0.5 <= found[name].floor < 0.62
    assert found["class"].synthetic > 0.4 and found["class"].floor < 0.2
    assert found[ALL].floor < 0.06 and found[ALL].synthetic <= found["class"].synthetic
    every = found["tone"].hits & found["class"].hits & found["side"].hits
    assert np.array_equal(found[ALL].hits, every)
    wrong = attribute_accuracies(
        Captioned(samples.images, turned), part(0, 900), part(1200, 1797), **settings
    )
    assert wrong["side"].synthetic == pytest.approx(1 - found["side"].synthetic)
    assert wrong["tone"].synthetic == found["tone"].synthetic
    json.dumps({name: one.to_json() for name, one in found.items()}, allow_nan=False)


def test_a_value_that_no_caption_asks_for_has_no_share(tmp_path: Path) -> None:
    bright = [i for i in range(900, 1200) if "bright" in TEXTS[i]]
    samples = Captioned(IMAGES[bright], [TEXTS[i] for i in bright])
    found = attribute_accuracies(samples, part(0, 900), None, FORM, CLASSES, steps=30, cache=None)
    assert found["tone"].by_value["dim"] is None and found["tone"].floor == 1.0
    assert found["tone"].by_value["bright"] == found["tone"].synthetic
    # Without captioned held-out records a tenth of the training records is kept for the ceiling.
    assert found["tone"].n_ceiling == 90


def test_captions_are_read_by_their_words_and_foreign_ones_are_not_quoted() -> None:
    places = slot_values(["A  dim 7 with a DOT left"], FORM, CLASSES)
    assert places.tolist() == [[1, 7, 0]]
    with pytest.raises(DataError, match="no filling of the plan's") as raised:
        slot_values(["a secret tumour", TEXTS[0]], FORM, CLASSES)
    assert "tumour" not in str(raised.value)
    with pytest.raises(DataError, match="a side is empty"):
        attribute_accuracies(
            Captioned(IMAGES[:0], []), part(0, 90), None, FORM, CLASSES, steps=1, cache=None
        )


def test_captions_come_from_the_vault_and_from_the_samples_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "digits.npz", images=IMAGES, labels=LABELS, captions=np.array(TEXTS))
    (tmp_path / "plan.yaml").write_text(PLAN)
    make_run(tmp_path / "plan.yaml", tmp_path / "run")
    private = open_private(load_verified(tmp_path / "run"))
    sides = [captioned_records(units) for units in (private.train, private.held_out)]
    assert sum(len(side.captions) for side in sides) == len(IMAGES)
    known = {image.tobytes(): text for image, text in zip(IMAGES, TEXTS, strict=True)}
    for side in sides:
        assert [known[image.tobytes()] for image in side.images] == list(side.captions)
    with pytest.raises(MissingError, match="no complete samples"):
        drawn_for(tmp_path / "samples")
    write_samples(tmp_path / "samples", IMAGES[:5], LABELS[:5], CLASSES, texts=TEXTS[:5])
    assert drawn_for(tmp_path / "samples") == TEXTS[:5]
