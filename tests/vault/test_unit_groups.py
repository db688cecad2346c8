"""Units of several images: grouped by value, kept by their own hashes, split by their names."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts.rooms import RunDir
from dpsynth.planning import verify
from dpsynth.planning.schema import HashHeldOut, Plan
from dpsynth.readers import BadRecord, Record
from dpsynth.vault import open_private
from dpsynth.vault.grouping import _KEPT, _Index, _scans, grouped
from dpsynth.vault.split import content_hash, is_unit_held_out


class Listed:
    """A source in memory that counts its scans and what lies open in them."""

    def __init__(self, names, bad=()):
        self.names, self.bad, self.scans, self.read = names, set(bad), 0, []

    def unit_names(self):
        return iter(self.names)

    def select(self, places):
        self.scans += 1
        for place in places:
            self.read.append(place)
            yield place, self.item(place)

    def item(self, place):
        if place in self.bad:
            return BadRecord(f"image {place}", "damaged")
        image = np.frombuffer(int(place).to_bytes(4), np.uint8).reshape(2, 2, 1)
        return Record(image, 0, self.names[place])


def place_of(record):
    return int.from_bytes(record.image.tobytes())


def found_in(source, most=3, limit=100, keep=lambda name: True):
    found = {}
    for unit in grouped(source, most, keep, limit):
        (name,) = {record.unit for record in unit}
        assert name not in found
        found[name] = [place_of(record) for record in unit]
    return found


def expected(source, most, keep=lambda name: True):
    whole = {}
    for place, name in enumerate(source.names):
        if name and keep(name) and place not in source.bad:
            whole.setdefault(name, []).append(source.item(place))
    return {
        name: [place_of(r) for r in sorted(mine, key=lambda r: content_hash(r, _KEPT))[:most]]
        for name, mine in whole.items()
    }


@given(
    names=st.lists(st.sampled_from(["a", "b", "c", "d", "e", ""]), max_size=40),
    most=st.integers(1, 5),
    limit=st.integers(1, 12),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_grouping_finds_every_unit_whatever_the_limit(names, most, limit, data):
    bad = data.draw(st.sets(st.integers(0, max(0, len(names) - 1)), max_size=5))
    source = Listed(names, bad)
    keep = lambda name: name != "e"  # noqa: E731
    assert found_in(source, most, limit, keep) == expected(source, most, keep)
    assert sorted(source.read) == [p for p, n in enumerate(names) if n and n != "e"]


@given(
    names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60),
    most=st.integers(1, 4),
    limit=st.integers(1, 10),
)
@settings(max_examples=100, deadline=None)
def test_no_scan_holds_more_than_the_limit(names, most, limit):
    index = _Index.of(iter(names), lambda name: True)
    scan_of = _scans(index, most, limit)
    images = np.minimum(index.images, most)
    for scan in range(scan_of.max() + 1):
        for place in range(len(names)):
            open_here = (index.first <= place) & (place <= index.last) & (scan_of == scan)
            assert images[open_here].sum() <= max(limit, images[open_here].max(initial=0))


def test_units_that_lie_together_take_one_scan():
    together = Listed([f"u{place // 4}" for place in range(400)])
    assert len(found_in(together, limit=4)) == 100
    assert together.scans == 1
    scattered = Listed([f"u{place % 100}" for place in range(400)])
    assert len(found_in(scattered, limit=30)) == 100
    assert scattered.scans == 10  # 3 images of each unit count, so ten units a scan


def test_which_images_are_kept_hangs_on_the_unit_alone():
    rng = np.random.default_rng(0)
    names = [f"u{rng.integers(0, 5)}" for _ in range(60)]
    whole = found_in(Listed(names))
    order = rng.permutation(60)

    class Shuffled(Listed):
        def item(self, place):
            return Listed(names).item(order[place])

    shuffled = Shuffled([names[i] for i in order])
    assert found_in(shuffled) == whole
    without = Listed([name if name != "u0" else "" for name in names])
    assert found_in(without) == {name: mine for name, mine in whole.items() if name != "u0"}


def test_a_record_that_names_another_unit_by_now_is_left_out():
    class Changed(Listed):
        def item(self, place):
            record = super().item(place)
            return Record(record.image, 0, "b") if place == 1 else record

    assert found_in(Changed(["a", "a", "b"])) == {"a": [0], "b": [2]}


def test_a_source_that_shrank_loses_units_and_invents_none():
    class Shrunk(Listed):
        def select(self, places):
            return super().select([place for place in places if place < 3])

    assert found_in(Shrunk(["a", "b", "a", "b"])) == {"a": sorted([0, 2], key=_digest_of("a"))}


def _digest_of(name):
    return lambda place: content_hash(Listed([name] * 9).item(place), _KEPT)


def private_data(root, units, images=None, held_out=None, most=2):
    n = len(units)
    images = np.arange(n * 12, dtype=np.uint8).reshape(n, 4, 3) if images is None else images
    root.mkdir(exist_ok=True)
    np.savez(root / "data.npz", images=images, labels=np.zeros(n, int), patient=units)
    plan = Plan.model_validate(
        {
            "name": "small",
            "budget": {
                "epsilon": 1.0,
                "delta": 1e-5,
                "unit": {"column": "patient", "most": most},
            },
            "private": {
                "source": {"kind": "npz", "path": root / "data.npz"},
                "capacity": 100,
                "image": {"height": 4, "width": 3},
                "classes": ["zero"],
                "held_out": held_out or {"by": "hash", "fraction": 0.3, "salt": "s"},
            },
            "public": [{"kind": "letters"}],
            "representation": {"kind": "pca", "code": 4},
            "stages": {"moments": {}},
        }
    )
    return open_private(verify.VerifiedPlan(plan, None, RunDir.create(root / "run"), verify._KEY))


def sides(data):
    return {
        side: [sorted({r.unit for r in unit}) for unit in units.records()]
        for side, units in (("train", data.train), ("held_out", data.held_out))
    }


def test_a_unit_lies_on_one_side_and_both_sides_hold_all(tmp_path):
    units = np.arange(120) % 40
    data = private_data(tmp_path, units)
    found = sides(data)
    names = [name for side in found.values() for (name,) in side]
    assert sorted(names, key=int) == [str(u) for u in range(40)]
    assert 3 < len(found["held_out"]) < 25
    for side in (data.train, data.held_out):
        assert side.most == 2
        assert all(len(unit) == 2 for unit in side.records())  # of three images
        owners = {r.unit for unit in side.records() for r in unit}
        assert len(side.arrays()[1]) == 3 * len(owners)  # evaluation takes every record
    by_side = {"train": set(), "held_out": set()}
    for side, item in data.items():
        by_side[side].add(item.unit)
    assert not by_side["train"] & by_side["held_out"]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), gone=st.integers(0, 7))
def test_removing_a_unit_never_moves_another(seed, gone, tmp_path_factory):
    rng = np.random.default_rng(seed)
    units = rng.integers(0, 8, 30)
    images = rng.integers(0, 256, (30, 4, 3), dtype=np.uint8)
    folder = tmp_path_factory.mktemp("units")

    def contents(rows):
        data = private_data(folder / "data", units[rows], images[rows])
        return {
            side: {
                unit[0].unit: [record.image.tobytes() for record in unit]
                for unit in units_of.records()
            }
            for side, units_of in (("train", data.train), ("held_out", data.held_out))
        }

    whole, less = contents(np.arange(30)), contents(np.flatnonzero(units != gone))
    for side, mine in whole.items():
        assert less[side] == {name: held for name, held in mine.items() if name != str(gone)}


def test_a_bad_record_is_found_once_and_contributes_nothing(tmp_path):
    data = private_data(tmp_path, np.array(["a", "", "b", "a"]))
    assert [item.name for item in data.train.bad] == ["image 1"]
    assert data.held_out.bad == []
    assert sum(len(units) for units in sides(data).values()) == 2


def test_held_out_by_source_is_read_record_by_record(tmp_path):
    np.savez(
        tmp_path / "test.npz", images=np.zeros((5, 4, 3), np.uint8), labels=np.zeros(5, np.int64)
    )
    other = {"by": "source", "source": {"kind": "npz", "path": tmp_path / "test.npz"}}
    data = private_data(tmp_path / "data", np.arange(12) // 3, held_out=other)
    assert [len(unit) for unit in data.train.records()] == [2] * 4
    assert data.held_out.most is None
    assert [len(unit) for unit in data.held_out.records()] == [1] * 5


@pytest.mark.parametrize("fraction", [0.1, 0.6])
def test_the_declared_fraction_of_names_is_held_out(fraction):
    rule = HashHeldOut(by="hash", fraction=fraction, salt="x")
    out = sum(is_unit_held_out(str(name), rule) for name in range(4000))
    assert abs(out / 4000 - fraction) < 4 * (fraction * (1 - fraction) / 4000) ** 0.5
    other = HashHeldOut(by="hash", fraction=fraction, salt="y")
    assert out != sum(
        is_unit_held_out(str(n), rule) and is_unit_held_out(str(n), other) for n in range(4000)
    )
