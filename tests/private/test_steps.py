"""Steps of DP-SGD: Poisson batches, one noise draw a step, declared divisor."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.allocation import LATEST
from dpsynth.planning.training import Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import ClippedSum, EngineSettings, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import (
    PrivateCodes,
    Workload,
    _line,
    append_log,
    draw_batch,
    flow_losses,
    noisy_mean,
    run_chunk,
)
from dpsynth.private.training_state import TrainingState

DIM, CLASSES = 6, 2


def workload(**changes):
    settings = Train(**({"rate": 0.2, "steps": 6, "multiplicity": 3, "buckets": 2} | changes))
    return Workload(settings, capacity=50, classes=CLASSES, low=0.4)


def codes(n, seed=0):
    source = generator(seed)
    labels = torch.randint(CLASSES, (n,), generator=source)
    return PrivateCodes(torch.randn(n, DIM, generator=source), labels)


def state(seed=2):
    with seeded_initialisation(seed):
        net = build_velocity(Velocity(width=8, depth=1), DIM, CLASSES)
    settings = Train(rate=0.2, steps=12, learning_rate=1e-2, ema=0.9)
    return TrainingState(net, settings, noise=0.1)


def slot(rate=0.2, steps=6, std=1.0):
    return Slot(1, "train", "train-0001", ClippedGradientSum(1.0), std, rate, steps)


def run(data, *, rate=0.2, steps=6, noise=None, carried=None):
    carried = carried or state()
    with PerExampleClipper(carried.model, flow_losses, 1.0) as clipper:
        log = run_chunk(
            slot(rate, steps),
            data,
            workload(),
            carried,
            clipper=clipper,
            noise=noise or NoiseSource(),
        )
    return carried, log


@pytest.mark.parametrize("n", [0, 1, 40])
def test_every_step_is_taken_also_on_an_empty_batch(n):
    carried, log = run(codes(n), rate=0.02)
    assert carried.step == 6
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert all(bool(p.isfinite().all()) for p in carried.model.parameters())
    fresh = dict(state().model.named_parameters())
    moved = [not torch.equal(p, fresh[n]) for n, p in carried.model.named_parameters()]
    assert all(moved)  # one full noise draw for every tensor


def test_records_that_are_not_finite_do_not_end_the_run():
    data = codes(20)
    data.codes[3] = float("nan")
    carried, log = run(data, rate=1.0)
    assert all(line["not_finite"] == 1 for line in log)
    assert all(bool(p.isfinite().all()) for p in carried.model.parameters())


def test_the_divisor_is_declared_and_the_noise_has_the_declared_variance():
    zero = ClippedSum(
        {"a": torch.zeros(60, 50), "b": torch.zeros(60, 50)}, torch.zeros(0), torch.zeros(0)
    )
    noise = NoiseSource()
    first, again = (noisy_mean(zero, 4.0, 10.0, noise) for _ in range(2))
    draws = [v.numpy().ravel() for v in (*first.values(), *again.values())]
    for draw in draws:
        n = len(draw)
        assert abs((draw**2).sum() / 0.4**2 - n) < 6 * math.sqrt(2 * n)
    correlations = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlations).max() < 6 / math.sqrt(3000)


def test_physical_batches_change_neither_coins_nor_noise():
    ends = []
    for physical in (2, 64):
        carried = state()
        with PerExampleClipper(
            carried.model, flow_losses, 1.0, settings=EngineSettings(physical=physical)
        ) as clipper:
            run_chunk(
                slot(),
                codes(40),
                workload(),
                carried,
                clipper=clipper,
                noise=NoiseSource.unsafe(1),
            )
        ends.append(torch.cat([p.detach().reshape(-1) for p in carried.model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


def test_two_runs_draw_other_noise():
    first, second = run(codes(0))[0], run(codes(0))[0]
    assert any(
        not torch.equal(p, q)
        for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )


def test_a_batch_holds_its_steps_bucket_alone_and_k_draws_a_record():
    work, noise, source = workload(), NoiseSource(), generator(0)
    for step in range(4):
        z, y, t, xi = draw_batch(codes(30), work, rate=1.0, step=step, noise=noise, source=source)
        low, high = work.bucket(step)
        assert t.shape == (30, 3)
        assert xi.shape == (30, 3, DIM)
        assert z.shape == (30, DIM)
        assert bool(((t >= low) & (t < high)).all())
        assert int(y.max()) <= CLASSES


def test_buckets_cover_the_interval():
    work = workload(buckets=5)
    edges = [work.bucket(step) for step in range(5)]
    assert edges[0][0] == 0.4
    assert edges[-1][1] == pytest.approx(LATEST)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(edges))


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    def go(carried, stream):
        return run(codes(30), noise=NoiseSource.unsafe(5, stream), carried=carried)[0]

    whole = go(go(state(), "a"), "b")
    half = go(state(), "a")
    half.save(tmp_path / "half.safetensors")
    resumed = state(seed=9)
    resumed.load(tmp_path / "half.safetensors")
    resumed = go(resumed, "b")
    assert resumed.step == whole.step == 12
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
    for name, value in whole.average.items():
        assert torch.equal(value, resumed.average[name])


def test_the_log_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "training.jsonl"
    append_log(path, run(codes(10))[1])
    append_log(path, run(codes(0))[1])
    assert len(path.read_text().splitlines()) == 12
    assert path.stat().st_mode & 0o077 == 0


def test_finite_losses_whose_sum_overflows_do_not_end_the_run(tmp_path):
    losses = torch.full((4,), 3e38)
    line = _line(0, ClippedSum({}, torch.ones(4, dtype=torch.float64), losses), 1.0)
    append_log(tmp_path / "training.jsonl", [line])
    assert line["loss"] == pytest.approx(3e38)
