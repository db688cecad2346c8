"""The lock: round trip, and no edit goes unseen."""

import json

import pytest
from spendkit import make_lock, make_slots

from dpsynth.accounting.events import GaussianEvent, PoissonGaussianEvent
from dpsynth.accounting.statistics import PaperClassSums, PaperSecondMoment
from dpsynth.artifacts.files import readable_json
from dpsynth.artifacts.lock import Slot, read_lock, write_lock
from dpsynth.errors import MissingError, ReplayError


def test_round_trip(tmp_path):
    lock = make_lock()
    write_lock(tmp_path / "plan.lock.json", lock)
    again = read_lock(tmp_path / "plan.lock.json")
    assert again == lock
    assert again.lock_hash == lock.lock_hash


def test_the_hash_covers_everything():
    lock = make_lock()
    assert make_lock(seed=1).lock_hash != lock.lock_hash
    assert make_lock(make_slots(chunks=3)).lock_hash != lock.lock_hash
    assert make_lock(budget={"epsilon": 2.0}).lock_hash != lock.lock_hash


def test_every_single_byte_change_is_caught(tmp_path):
    path = tmp_path / "plan.lock.json"
    write_lock(path, make_lock(make_slots(chunks=1)))
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:  # in place: each emptying would wait for the disk
        for at in range(len(data)):
            flip = (1, 2, 0x20, 0x80)[at % 4]
            file.seek(at)
            file.write(bytes([data[at] ^ flip]))
            with pytest.raises(ReplayError):
                read_lock(path)
            file.seek(at)
            file.write(data[at : at + 1])
        assert read_lock(path).lock_hash  # whole again
        for at in sorted(range(0, len(data), 3), reverse=True):
            file.truncate(at)
            with pytest.raises(ReplayError):
                read_lock(path)


def test_another_spelling_or_a_repeated_key_is_an_edit(tmp_path):
    path = tmp_path / "plan.lock.json"
    body = make_lock().to_json()
    for text in (
        json.dumps(body),
        readable_json(body).decode() + "\n",
        readable_json(body).decode().replace('"delta_slack"', '"epsilon": 9.0,\n"delta_slack"'),
    ):
        path.write_text(text)
        with pytest.raises(ReplayError):
            read_lock(path)


def test_missing_and_future_lock(tmp_path):
    with pytest.raises(MissingError, match=r"plan\.lock\.json"):
        read_lock(tmp_path / "plan.lock.json")
    (tmp_path / "x").write_bytes(readable_json({**make_lock().to_json(), "format": 99}))
    with pytest.raises(ReplayError, match="format 99"):
        read_lock(tmp_path / "x")


def test_slots():
    lock = make_lock(make_slots(chunks=2, spares=1))
    assert [slot.name for slot in lock.stage_slots("moments")] == ["moments", "moments-spare-1"]
    assert [slot.id for slot in lock.stage_slots("train")] == [3, 4]
    assert lock.slots[1].release == "moments"
    assert lock.slots[0].event() == GaussianEvent(5.0)
    assert lock.slots[2].event() == PoissonGaussianEvent(2.0, 0.02, 10)
    assert lock.noise_source == "os-entropy"
    assert make_lock(seed=0).noise_source == "UNSAFE-seed"


@pytest.mark.parametrize("statistic", [PaperClassSums(10, 32), PaperSecondMoment(1000, 32)])
def test_slot_json_round_trip(statistic):
    slot = Slot(1, "moments", "moments-sums", statistic, 0.5)
    assert Slot.from_json(slot.to_json()) == slot
