"""Times of DP-SGD's draws: uniform in their bucket as ever, or with a normal logit on (0, 1)."""

import torch

from dpsynth.models.seeding import generator
from dpsynth.planning.training import Train
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, draw_batch


def workload(**changes):
    return Workload(Train(rate=0.5, steps=4, **changes), capacity=50, classes=3, low=0.0)


def test_logit_normal_times_have_a_standard_normal_logit():
    work = workload(times="logit-normal", buckets=1)
    t = work.times((20_000, 2), 3, generator(0))
    assert t.shape == (20_000, 2)
    assert 0 < float(t.min()) < float(t.max()) < 1
    logit = torch.logit(t.double())
    assert abs(float(logit.mean())) < 0.03
    assert abs(float(logit.std()) - 1) < 0.03
    # Half of a logit-normal's mass lies within 0.1624 of 1/2: sigmoid(0.6745) = 0.6625.
    assert abs(float(((t - 0.5).abs() < 0.1625).double().mean()) - 0.5) < 0.02


def test_uniform_times_are_drawn_as_before():
    work = workload(buckets=2)
    low, high = work.bucket(1)
    drawn = low + (high - low) * torch.rand((5, 4), generator=generator(7))
    assert torch.equal(work.times((5, 4), 1, generator(7)), drawn)


def test_a_batch_takes_the_plans_times():
    data = PrivateCodes(torch.zeros(40, 2), torch.zeros(40, dtype=torch.long))
    work = workload(times="logit-normal", buckets=1, multiplicity=3)
    _, _, t, xi = draw_batch(
        data, work, rate=1.0, step=0, noise=NoiseSource.unsafe(1), source=generator(2)
    )
    assert torch.equal(t, work.times((40, 3), 0, generator(2)))
    assert xi.shape == (40, 3, 2)
