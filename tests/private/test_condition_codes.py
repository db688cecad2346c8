"""Codes of captioned records: conditions for labels, or captions beside them, and no more."""

import json

import numpy as np
import pytest
import torch
from private.unitkit import CLASSES, DIM, Listed, Pixels, joined

from dpsynth.artifacts.rooms import RunDir
from dpsynth.models.velocity import build_velocity, describe, save_velocity
from dpsynth.planning.caption_rules import caption_rule
from dpsynth.planning.captions import FreeCaptions, Template
from dpsynth.planning.schema import HashHeldOut, ImageShape, Plan
from dpsynth.planning.training import Train
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private import flow_task
from dpsynth.private.encoding import encoded
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.steps import flow_losses
from dpsynth.private.training_state import TrainingState
from dpsynth.readers import Record
from dpsynth.vault import NamedUnits, Units
from dpsynth.vault.split import content_hash, content_hashes, held_out_rows, is_held_out

NAMES = ["cat", "dog", "emu"]
SHAPE = ImageShape(height=1, width=DIM)
MADE = Template(kind="template", template="a {size} {class}", slots={"size": ["big", "wee"]})
RULE = caption_rule(MADE, NAMES)
FREE = caption_rule(FreeCaptions(kind="free"), NAMES)
TEXTS = MADE.captions(NAMES)


def records(count=40, seed=0, units=0):
    draw = np.random.default_rng(seed)
    conditions = draw.integers(0, len(TEXTS), count)
    owners = MADE.owners(NAMES)
    return conditions, [
        Record(
            draw.integers(0, 256, (1, DIM, 1)).astype(np.uint8),
            owners[condition],
            f"u{number % units}" if units else "",
            TEXTS[condition],
        )
        for number, condition in enumerate(conditions)
    ]


def code(listed, rule, rows=7, space=None, most=None):
    source = Listed(listed)
    units = Units(source, SHAPE) if most is None else NamedUnits(source, SHAPE, images=most)
    return list(encoded(units, space or Pixels(), CLASSES, rows, captions=rule))


class Holed(Pixels):
    """Pixels, of which a bright first one has no finite code."""

    def encode_exact_many(self, images):
        codes = super().encode_exact_many(images)
        codes[images[:, 0, 0, 0] > 200] = np.nan
        return codes


def test_labels_are_conditions_and_codes_are_those_of_plain_records():
    conditions, listed = records()
    parts = code(listed, RULE)
    found, plain = joined(parts), joined(code(listed, None))
    np.testing.assert_array_equal(found.codes, plain.codes)
    np.testing.assert_array_equal(found.labels, conditions)
    np.testing.assert_array_equal(plain.labels, [record.label for record in listed])
    assert all(part.captions is None for part in parts)


def test_a_record_whose_caption_names_no_condition_contributes_nothing():
    conditions, listed = records()
    bad = [Record(record.image, record.label, "", "a huge cat") for record in listed[:3]]
    found = joined(code(bad + listed, RULE))
    np.testing.assert_array_equal(found.labels, conditions)


def test_free_captions_lie_beside_the_codes_that_are_finite():
    _, listed = records()
    said = [Record(r.image, r.label, "", f"{r.text} no {n}") for n, r in enumerate(listed)]
    parts = code(said, FREE, space=Holed())
    assert parts[0].captions == ()
    kept = [record for record in said if record.image[0, 0, 0] <= 200]
    assert 0 < len(kept) < len(said)
    assert [text for part in parts for text in part.captions] == [r.text for r in kept]
    np.testing.assert_array_equal(joined(parts).labels, [r.label for r in kept])


@pytest.mark.parametrize("rule", [RULE, FREE])
def test_units_of_several_images_keep_their_images_together(rule):
    conditions, listed = records(units=9)
    most = 3
    parts = code(listed, rule, space=Holed(), most=most)
    found = joined(parts)
    assert found.sizes.max() <= most and found.sizes.sum() == len(found.labels)
    # Independently: of each unit the images of smallest hash, the finite ones of these.
    wanted = []
    for name in sorted({r.unit for r in listed}):
        mine = [(r, c) for r, c in zip(listed, conditions, strict=True) if r.unit == name]
        mine.sort(key=lambda pair: content_hash(pair[0], "which images of a unit are kept"))
        kept = [(r, c) for r, c in mine[:most] if r.image[0, 0, 0] <= 200]
        wanted.append(sorted((int(c), r.text, r.label) for r, c in kept))
    captions = [t for part in parts for t in part.captions or [None] * len(part.labels)]
    ends = np.cumsum(found.sizes)
    mine = []
    for end, size in zip(ends, found.sizes, strict=True):
        rows = range(end - size, end)
        mine.append(sorted((int(found.labels[k]), captions[k]) for k in rows))
    expected = [
        [(c, None) if rule is RULE else (label, text) for c, text, label in unit]
        for unit in wanted
        if unit
    ]
    assert sorted(map(sorted, expected), key=str) == sorted(mine, key=str)


def test_a_caption_is_part_of_a_records_content_and_nothing_changes_without_one():
    _, listed = records(6)
    images = np.stack([r.image for r in listed])
    labels = np.array([r.label for r in listed])
    texts = tuple(r.text for r in listed)
    one = list(content_hashes(images, labels, "s", texts))
    assert one == [content_hash(r, "s") for r in listed]
    bare = [Record(r.image, r.label) for r in listed]
    assert list(content_hashes(images, labels, "s")) == [content_hash(r, "s") for r in bare]
    assert set(one).isdisjoint(content_hashes(images, labels, "s"))
    rule = HashHeldOut(by="hash", fraction=0.5, salt="x")
    rows = held_out_rows(images, labels, rule, texts)
    assert rows.tolist() == [is_held_out(r, rule) for r in listed]


def plan(source, captions, features):
    return Plan.model_validate(
        {
            "name": "said",
            "budget": {"epsilon": 1.0, "delta": 1e-5},
            "private": {
                "source": {"kind": "npz", "path": str(source), "captions": "said"},
                "capacity": 100,
                "image": {"height": 1, "width": DIM},
                "classes": NAMES,
                "held_out": {"by": "hash", "fraction": 0.2},
                "captions": captions,
            },
            "public": [{"kind": "letters", "count": 10}],
            "representation": {"kind": "pca", "code": DIM},
            "stages": {
                "moments": {"covariance": "shared", "captions": features},
                "train": {"rate": 0.5, "steps": 2, "buckets": 1, "multiplicity": 2},
            },
            "velocity": {"kind": "mmdit", "width": 16, "depth": 2, "heads": 2},
            "sampling": {"method": "flow", "captions": "public.txt"},
        }
    )


SECRET = "a very zymurgic quokka"


@pytest.fixture
def free_run(tmp_path):
    """A verified plan of free captions (nothing charged), and its records."""
    _, listed = records(30)
    said = [f"{r.text} {SECRET} {n}" for n, r in enumerate(listed)]
    source = tmp_path / "private.npz"
    np.savez(
        source,
        images=np.stack([r.image for r in listed]),
        labels=[r.label for r in listed],
        said=np.array(said),
    )
    made = plan(source, {"kind": "free"}, {"features": "sentence", "encoder": "minilm"})
    verified = VerifiedPlan.__new__(VerifiedPlan)
    for key, value in {"plan": made, "run": RunDir.create(tmp_path / "run")}.items():
        object.__setattr__(verified, key, value)
    return verified, said


def test_training_makes_the_captions_table_in_memory_and_no_file_has_it(free_run, tmp_path):
    verified, said = free_run
    data = flow_task.load_codes(verified, Pixels())
    assert 0 < len(data.labels) < len(said)  # some are held out
    assert data.labels.tolist() == list(range(len(data.codes)))
    places = [said.index(text) for text in data.captions]
    assert places == sorted(places)
    settings = verified.plan.velocity
    torch.manual_seed(0)
    model = build_velocity(settings, DIM, CLASSES, captions=NAMES)
    empty = set(model.state_dict())
    describe(model, data.captions)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    assert set(model.state_dict()) == empty and "ids" not in empty
    # Null is the row after the last, and a label means its own record's caption alone.
    x, t = torch.randn(2, DIM), torch.full((2,), 0.5)
    count = len(data.captions)
    out = model(x, t, torch.tensor([3, count]))
    describe(model, [data.captions[3]])
    assert torch.equal(out, model(x, t, torch.tensor([0, 1])))
    describe(model, data.captions)
    state = TrainingState(model, Train(rate=0.5, steps=2), 1.0)
    shapes = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    state.apply(shapes)
    checkpoint, released = tmp_path / "c.safetensors", tmp_path / "model.safetensors"
    state.save(checkpoint)
    save_velocity(state.averaged(), released, settings, room="released", low="0.0")
    for path in (checkpoint, released):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        assert b"quokka" not in content and not [key for key in header if "ids" in key]
        assert all(v["dtype"].startswith("F") for k, v in header.items() if k != "__metadata__")


def test_gradients_are_a_function_of_the_records_own_caption(free_run):
    verified, _ = free_run
    data = flow_task.load_codes(verified, Pixels())
    torch.manual_seed(0)
    model = build_velocity(verified.plan.velocity, DIM, CLASSES, captions=NAMES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    place, draws = 4, 2
    z, xi = data.codes[place : place + 1], torch.randn(1, draws, DIM)
    t = torch.full((1, draws), 0.4)
    with PerExampleClipper(model, flow_losses, 0.1) as clipper:
        # The table comes after the clipper, as in training: then the records are read.
        describe(model, data.captions)
        one = clipper.clipped_sum(z, data.labels[place : place + 1], t, xi)
        describe(model, [data.captions[place], "something else"])
        other = clipper.clipped_sum(z, torch.tensor([0]), t, xi)
        describe(model, ["something else", "and more"])
        third = clipper.clipped_sum(z, torch.tensor([0]), t, xi)
    assert all(torch.equal(one.gradients[n], other.gradients[n]) for n in one.gradients)
    assert not all(torch.equal(one.gradients[n], third.gradients[n]) for n in one.gradients)
