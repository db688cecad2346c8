"""The vault: its only key, units, and a split that looks at one record alone."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import UsageError
from dpsynth.planning import verify
from dpsynth.planning.schema import HashHeldOut, Plan
from dpsynth.readers import Record
from dpsynth.vault import PrivateData, open_private
from dpsynth.vault.split import is_held_out

RULE = {"by": "hash", "fraction": 0.3, "salt": "s"}


def idx_source(folder: Path, images: np.ndarray, labels: np.ndarray, name: str = "a") -> dict:
    paths = {"images": folder / f"{name}-images", "labels": folder / f"{name}-labels"}
    for path, array in zip(paths.values(), (images, labels), strict=True):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        path.write_bytes(head + array.astype(np.uint8).tobytes())
    return {"kind": "idx", **paths}


def verified_plan(source: dict, run: Path, held_out: dict | None = None, capacity: int = 100):
    plan = Plan.model_validate(
        {
            "name": "small",
            "budget": {"epsilon": 1.0, "delta": 1e-5},
            "private": {
                "source": source,
                "capacity": capacity,
                "image": {"height": 4, "width": 3},
                "classes": ["zero", "one", "two"],
                "held_out": held_out or RULE,
            },
            "public": [{"kind": "letters"}],
            "representation": {"kind": "pca", "code": 4},
            "stages": {"moments": {}},
        }
    )
    # Calibration is not what is tested here, so the lock is left out.
    return verify.VerifiedPlan(plan, None, RunDir.create(run), verify._KEY)


def data_of(images: np.ndarray, labels: np.ndarray, folder: Path, **options) -> PrivateData:
    folder.mkdir(exist_ok=True)
    return open_private(
        verified_plan(idx_source(folder, images, labels), folder / "run", **options)
    )


def some(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (n, 4, 3), dtype=np.uint8), generator.integers(0, 3, n)


@pytest.mark.parametrize("key", [None, "runs/digits", {"plan": 1}])
def test_only_a_verified_plan_opens_it(key):
    with pytest.raises(UsageError, match="VerifiedPlan alone"):
        open_private(key)


def test_a_plain_plan_does_not_open_it(tmp_path):
    verified = verified_plan(idx_source(tmp_path, *some(2)), tmp_path / "run")
    with pytest.raises(UsageError):
        open_private(verified.plan)


def test_nothing_is_read_before_units_are_iterated(tmp_path):
    source = {"kind": "idx", "images": tmp_path / "none", "labels": tmp_path / "none"}
    open_private(verified_plan(source, tmp_path / "run"))


def test_both_sides_together_are_the_records_in_order(tmp_path):
    images, labels = some(60)
    data = data_of(images, labels, tmp_path)
    sides = [units.arrays() for units in (data.train, data.held_out)]
    assert sides[0][0].shape[1:] == (4, 3, 1) and sides[0][0].dtype == np.uint8
    assert sides[0][1].dtype == np.int64
    assert len(sides[0][0]) + len(sides[1][0]) == 60
    assert 5 < len(sides[1][0]) < 30
    given_rows = [row.tobytes() for row in images]
    places = [given_rows.index(row.tobytes()) for row in sides[0][0]]
    assert places == sorted(places)
    rows = {
        (row.tobytes(), label) for rows, ys in sides for row, label in zip(rows, ys, strict=True)
    }
    assert rows == {(row.tobytes(), label) for row, label in zip(images, labels, strict=True)}


def test_units_are_lists_of_one_record_and_can_be_read_again(tmp_path):
    data = data_of(*some(20), tmp_path)
    for _ in range(2):
        units = list(data.train.records())
        assert all(len(unit) == 1 and isinstance(unit[0], Record) for unit in units)
        assert len(units) == len(data.train.arrays()[1])


def test_one_pass_gives_the_same_sides(tmp_path):
    data = data_of(*some(40), tmp_path)
    by_side = {"train": [], "held_out": []}
    for side, item in data.items():
        by_side[side].append(item.image.tobytes())
    for side, units in (("train", data.train), ("held_out", data.held_out)):
        assert by_side[side] == [row.tobytes() for row in units.arrays()[0]]


def test_bad_records_are_dropped_and_listed_once(tmp_path):
    images, labels = some(30)
    labels[4] = 9
    data = data_of(images, labels, tmp_path)
    assert [item.name for item in data.train.bad] == ["image 4"]
    assert data.held_out.bad == []
    assert len(data.train.arrays()[1]) + len(data.held_out.arrays()[1]) == 29


def test_an_empty_side_has_arrays_of_the_declared_shape(tmp_path):
    images, labels = data_of(*some(0), tmp_path).train.arrays()
    assert images.shape == (0, 4, 3, 1) and labels.shape == (0,)


def test_held_out_by_a_source_of_its_own(tmp_path):
    test = idx_source(tmp_path, *some(7, seed=1), name="test")
    data = data_of(*some(20), tmp_path, held_out={"by": "source", "source": test})
    assert len(data.train.arrays()[1]) == 20
    assert len(data.held_out.arrays()[1]) == 7
    assert {side for side, _ in data.items()} == {"train", "held_out"}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 12), data=st.data())
def test_removing_a_record_never_moves_another(seed, n, data, tmp_path_factory):
    images, labels = some(n, seed)
    gone = data.draw(st.integers(0, n - 1))
    kept = np.arange(n) != gone
    folder = tmp_path_factory.mktemp("vault")
    full = data_of(images, labels, folder / "full")
    less = data_of(images[kept], labels[kept], folder / "less")
    for side in ("train", "held_out"):
        before = [row.tobytes() for row in getattr(full, side).arrays()[0]]
        after = [row.tobytes() for row in getattr(less, side).arrays()[0]]
        assert after in (before, [row for row in before if row != images[gone].tobytes()])


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_declared_fraction_is_met_on_average(fraction):
    rule = HashHeldOut(by="hash", fraction=fraction, salt="x")
    images, labels = some(4000)
    out = sum(
        is_held_out(Record(image[..., None], int(label)), rule)
        for image, label in zip(images, labels, strict=True)
    )
    assert abs(out / 4000 - fraction) < 4 * (fraction * (1 - fraction) / 4000) ** 0.5


def test_salt_label_shape_and_pixels_all_enter_the_hash():
    from dpsynth.vault.split import content_hash

    image = np.arange(12, dtype=np.uint8).reshape(4, 3, 1)
    other = image.copy()
    other[0, 0, 0] = 1
    hashes = {
        content_hash(Record(image, 1), "a"),
        content_hash(Record(image, 1), "b"),
        content_hash(Record(image, 2), "a"),
        content_hash(Record(image.reshape(3, 4, 1), 1), "a"),
        content_hash(Record(other, 1), "a"),
    }
    assert len(hashes) == 5


def test_nothing_is_copied_to_disk(tmp_path):
    data = data_of(*some(20), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    data.train.arrays()
    list(data.held_out.records())
    assert sorted(tmp_path.rglob("*")) == before


def test_the_digits_plan_holds_out_500():
    from dpsynth.planning.yaml_plan import load_plan
    from dpsynth.readers import open_source

    plan = load_plan(Path(__file__).parents[2] / "plans" / "digits.yaml")
    rule, private = plan.private.held_out, plan.private
    records = open_source(private.source, private.classes, private.image)
    labels = [record.label for record in records if is_held_out(record, rule)]
    assert len(labels) == 500
    assert min(np.bincount(labels)) >= 40
