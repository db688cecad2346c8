"""Values that rehearsals remember, of small tensors and of those that are too large to copy."""

import pytest
import torch

from dpsynth.private.engine import remembered
from dpsynth.private.engine.remembered import Remembered

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.fixture(params=[2**20, 7], ids=["copies", "sums"])
def few(request, monkeypatch):
    """How many numbers are copied, so that small tensors stand for large ones too."""
    monkeypatch.setattr(remembered, "_WHOLE", request.param)


def tensor(kind):
    draw = torch.Generator().manual_seed(0)
    if kind == torch.bool:
        return torch.rand(5, 6, generator=draw) > 0.5
    whole = torch.randint(-9, 9, (5, 6), generator=draw)
    return whole.to(kind) * (1 if kind == torch.int64 else 0.37)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_any_change_is_seen_and_none_else(few, kind):
    x = tensor(kind)
    held = Remembered([x, torch.ones(3)])
    assert held.hold()
    assert held.hold()
    before = x.clone()
    for place in ((0, 0), (4, 5)):
        x[place] = ~x[place] if kind == torch.bool else x[place] + 1
        assert not held.hold()
        x.copy_(before)
        assert held.hold()


def test_exchanged_numbers_and_signs_are_seen(few):
    for change in (lambda x: x.flip(1), lambda x: -x, lambda x: x.roll(8)):
        for kind in (torch.float32, torch.float64):
            x = tensor(kind)
            held = Remembered([x])
            x.data.copy_(change(x.clone()))
            assert not held.hold()


def test_what_is_no_number_stays_the_same(few):
    x = torch.full((3, 5), torch.nan)
    assert Remembered([x, x.T]).hold()


def test_tensors_that_are_not_contiguous(few):
    x = torch.arange(40.0).view(5, 8)
    held = Remembered([x.T])
    x[2, 3] += 1
    assert not held.hold()
