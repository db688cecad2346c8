"""Gradient canaries: through the real clip, coins, sum and noise, and nothing else disturbed."""

import numpy as np
import pytest
import torch

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.assess.audit.controls import RepeatedNoise, SilentNoise
from dpsynth.assess.audit.whitebox import (
    STEEP,
    Coordinates,
    Planted,
    PlantedClipper,
    WatchedState,
    spread_coordinates,
)
from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.training import Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import MARGIN, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState

DIM, RADIUS, CANARIES = 5, 3.0, 40
SETTINGS = Train(rate=0.5, steps=8, chunk=8, multiplicity=2, buckets=2, clip=0.7)
WORK = Workload(SETTINGS, capacity=60, classes=3, low=0.0)


def _model():
    with seeded_initialisation(3):
        return build_velocity(Velocity(kind="mlp", width=8, depth=1), DIM, 3)


def _data(count=50, sizes=None):
    source = generator(1)
    codes = torch.randn(count, DIM, generator=source)
    codes /= codes.norm(dim=1, keepdim=True).clamp(min=1)
    return PrivateCodes(codes, torch.arange(count) % 3, sizes)


def _included():
    return np.arange(CANARIES) % 2 == 0


def _run(noise, *, control=None, std=1e-3, sizes=None, state=WatchedState):
    model, included = _model(), _included()
    where = spread_coordinates(model, CANARIES)
    planted = Planted.among(_data(sizes=sizes), included, RADIUS)
    kept = state(model, SETTINGS, std, coordinates=where, divisor=30.0)
    slot = Slot(1, "train", "train-0001", ClippedGradientSum(0.7), std, 0.5, 8)
    clipper = PlantedClipper(model, planted, where, SETTINGS, control=control)
    run_chunk(slot, planted.data, WORK, kept, clipper=clipper, noise=noise)
    return kept, clipper, included


def test_canaries_have_weights_of_their_own_in_every_tensor():
    model = _model()
    where = spread_coordinates(model, CANARIES)
    pairs = set(zip(where.names, where.places.tolist(), strict=True))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert len(pairs) == len(where) == CANARIES
    assert set(where.names) == set(sizes)
    assert all(0 <= place < sizes[name] for name, place in pairs)


def test_fewer_weights_than_canaries_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="need a weight each"):
        spread_coordinates(model, 7)


def test_few_canaries_of_a_small_model_take_its_largest_tensors_first():
    where = spread_coordinates(_model(), 3)
    assert len(set(where.names)) == len(where) == 3


def test_records_and_canaries_are_told_apart_by_their_codes():
    planted = Planted.among(_data(), _included(), RADIUS)
    rows = planted.rows(planted.data.codes)
    assert rows[:50].tolist() == [-1] * 50
    assert rows[50:].tolist() == np.flatnonzero(_included()).tolist()
    assert planted.unit >= 2 * RADIUS


def test_a_batch_is_the_records_sum_and_one_clipped_entry_a_canary():
    model = _model()
    where = spread_coordinates(model, CANARIES)
    planted = Planted.among(_data(), _included(), RADIUS)
    source = generator(5)
    codes, labels = planted.data.codes, planted.data.labels
    t, xi = torch.rand(len(codes), 2, generator=source), torch.randn(70, 2, DIM, generator=source)
    found = PlantedClipper(model, planted, where, SETTINGS).clipped_sum(codes, labels, t, xi)
    alone = PerExampleClipper(model, flow_losses, 0.7).clipped_sum(
        codes[:50], labels[:50], t[:50], xi[:50]
    )
    apart = {name: found.gradients[name] - alone.gradients[name] for name in found.gradients}
    entries = where.read(apart)
    assert entries[_included()] == pytest.approx(0.7 * (1 - MARGIN), rel=1e-6)
    assert np.abs(entries[~_included()]).max() < 1e-6
    whole = torch.cat([part.flatten() for part in apart.values()])
    assert int((whole.abs() > 1e-6).sum()) == CANARIES // 2
    assert len(found.norms) == 70 and found.norms[50:].tolist() == pytest.approx([0.7 * STEEP] * 20)


def _residual(*arguments, **named):
    state, clipper, included = _run(*arguments, **named)
    return state.seen - clipper.known, included


def test_each_step_tosses_a_coin_for_each_canary():
    seen, included = _residual(SilentNoise())
    assert seen.shape == (8, CANARIES)
    assert np.abs(seen[:, ~included]).max() < 1e-6  # nothing but what is known
    joined = seen[:, included] > 0.35
    assert seen[:, included][joined] == pytest.approx(0.7 * (1 - MARGIN), rel=1e-5)
    assert np.abs(seen[:, included][~joined]).max() < 1e-6
    assert 0.3 < joined.mean() < 0.7  # 160 coins of 1/2
    assert len({tuple(row) for row in joined.tolist()}) == 8


def test_without_a_clip_a_canary_adds_its_whole_gradient():
    seen, included = _residual(SilentNoise(), control="no-clip")
    assert seen[:, included].max() == pytest.approx(0.7 * STEEP, rel=1e-3)


def test_noise_that_is_reused_is_the_same_in_every_step():
    seen, included = _residual(RepeatedNoise(), std=50.0)
    # Float32 rounds sums of some 100; fresh noise would differ by as much as it is long.
    assert np.abs(seen[:, ~included] - seen[0, ~included]).max() < 1e-3
    assert seen[0].std() > 20


def test_watching_changes_nothing_of_the_training():
    class Plain(TrainingState):
        def __init__(self, model, settings, noise, *, coordinates, divisor):
            super().__init__(model, settings, noise)

    watched, _, _ = _run(NoiseSource.unsafe(4), std=50.0)
    plain, _, _ = _run(NoiseSource.unsafe(4), std=50.0, state=Plain)
    assert watched.digest() == plain.digest()
    assert 40 < watched.seen.std() < 60  # fresh noise of the slot's deviation in every step
    assert np.abs(np.corrcoef(watched.seen)[0, 1:]).max() < 0.8


def test_canaries_join_units_of_several_images():
    seen, included = _residual(SilentNoise(), sizes=torch.full((25,), 2))
    assert (seen[:, included] > 0.35).mean() == pytest.approx(0.5, abs=0.2)
    assert np.abs(seen[:, ~included]).max() < 1e-6


def test_masks_name_every_tensor_for_any_batch():
    where = Coordinates(("a", "b"), np.array([0, 3]))
    masks = where.masks([1], {"a": (2,), "b": (2, 2)})
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "a": [[0, 0]],
        "b": [[[0, 0], [0, 1]]],
    }
