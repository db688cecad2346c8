"""Steps of DP-SGD on units of several images: coins by unit, one clipped gradient a unit."""

import numpy as np
import pytest
import torch

from dpsynth.models.flow import drop_labels
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.training import Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, draw_batch, flow_losses

DIM, CLASSES = 6, 3


def workload(**changes):
    settings = Train(**({"rate": 0.2, "steps": 6, "multiplicity": 4, "buckets": 2} | changes))
    return Workload(settings, capacity=50, classes=CLASSES, low=0.4)


def units(sizes, seed=0):
    """Codes whose first number is the image's place, so that draws can be told apart."""
    n = sum(sizes)
    codes = torch.randn(n, DIM, generator=generator(seed))
    codes[:, 0] = torch.arange(n)
    labels = torch.randint(CLASSES, (n,), generator=generator(seed + 1))
    return PrivateCodes(codes, labels, torch.tensor(sizes, dtype=torch.int64))


def drawn(data, work, rate=1.0, noise=None, seed=0):
    return draw_batch(
        data, work, rate=rate, step=0, noise=noise or NoiseSource(), source=generator(seed)
    )


def net(kind="mlp", seed=2):
    with seeded_initialisation(seed):
        model = build_velocity(Velocity(kind=kind, width=8, depth=1), DIM, CLASSES)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_records_are_drawn_as_before_bit_for_bit():
    data, work, rate = units([1] * 40), workload(), 0.3
    data = PrivateCodes(data.codes, data.labels)
    z, y, t, xi = drawn(data, work, rate, NoiseSource.unsafe(4))
    source = generator(0)
    chosen = torch.from_numpy(NoiseSource.unsafe(4).coins(40, rate))
    draws = (int(chosen.sum()), 4)
    low, high = work.bucket(0)
    assert torch.equal(z, data.codes[chosen])
    assert torch.equal(t, low + (high - low) * torch.rand(draws, generator=source))
    assert torch.equal(xi, torch.randn((*draws, DIM), generator=source))
    rate = work.settings.label_dropout
    assert torch.equal(y, drop_labels(data.labels[chosen], rate, CLASSES, source))


def test_units_of_one_image_are_drawn_by_the_coins_of_records():
    data = units([1] * 40)
    plain, _, _, _ = drawn(
        PrivateCodes(data.codes, data.labels), workload(), 0.3, NoiseSource.unsafe(4)
    )
    z, _, _, _ = drawn(data, workload(), 0.3, NoiseSource.unsafe(4))
    assert torch.equal(z, plain[:, None].expand(-1, 4, -1))


def test_draws_go_through_a_units_images_in_turn_from_a_random_one():
    sizes = [1, 2, 3, 7]
    data, work = units(sizes), workload(label_dropout=0.0)
    starts, seen = np.cumsum([0, *sizes]), {2: set(), 3: set()}
    for seed in range(60):
        z, y, t, xi = drawn(data, work, seed=seed)
        assert z.shape == xi.shape == (4, 4, DIM)
        assert y.shape == t.shape == (4, 4)
        places = z[..., 0].long()
        assert torch.equal(y, data.labels[places])
        for unit, size in enumerate(sizes):
            turn = (places[unit] - starts[unit]).tolist()
            assert turn == [(turn[0] + k) % size for k in range(4)]
            if size in seen:
                seen[size].add(turn[0])
    assert seen == {2: {0, 1}, 3: {0, 1, 2}}


def test_the_coin_is_by_unit_and_the_batch_counts_units():
    data = units([9] * 300)
    batches = [drawn(data, workload(), rate=0.1)[0].shape[0] for _ in range(200)]
    mean, variance = 300 * 0.1, 300 * 0.1 * 0.9
    assert abs(np.mean(batches) - mean) < 5 * (variance / 200) ** 0.5
    assert 0.6 * variance < np.var(batches) < 1.6 * variance


def test_no_unit_at_all_gives_an_empty_batch_of_whole_units():
    for data, rate in ((units([]), 1.0), (units([2, 2]), 1e-9)):
        z, y, t, xi = drawn(data, workload(), rate)
        assert z.shape == xi.shape == (0, 4, DIM)
        assert y.shape == t.shape == (0, 4)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_labels_of_each_draw_condition_that_draw(kind):
    model = net(kind)
    x, t = torch.randn(5, 4, DIM), torch.rand(5, 4)
    y = torch.randint(CLASSES + 1, (5, 4))
    whole = model(x, t, y)
    for k in range(4):
        torch.testing.assert_close(whole[:, k], model(x[:, k], t[:, k], y[:, k]))
    same = y[:, :1].expand(-1, 4)
    torch.testing.assert_close(model(x, t, same), model(x, t, y[:, 0]))


def test_a_units_loss_is_the_average_over_its_images_draws():
    model, (z, y, t, xi) = net(), drawn(units([1, 3, 5]), workload())
    whole = flow_losses(model, z, y, t, xi)
    each = [
        flow_losses(model, z[:, k], y[:, k], t[:, k : k + 1], xi[:, k : k + 1]) for k in range(4)
    ]
    torch.testing.assert_close(whole, torch.stack(each).mean(dim=0))


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("clip", [1e-3, 1.0])
def test_a_whole_unit_moves_the_sum_by_at_most_the_clip(kind, clip):
    """One gradient a unit: with 9 images it adds no more than with one."""
    sizes = [9, 1, 2, 9]
    batch = drawn(units(sizes), workload(multiplicity=8))
    with PerExampleClipper(net(kind), flow_losses, clip) as clipper:
        whole = clipper.clipped_sum(*batch).gradients
        for gone in range(len(sizes)):
            kept = [unit for unit in range(len(sizes)) if unit != gone]
            less = clipper.clipped_sum(*(part[kept] for part in batch)).gradients
            square = sum(float((whole[n] - less[n]).square().sum()) for n in whole)
            assert square**0.5 <= clip
            assert square > 0
        draws = [part.flatten(0, 1) for part in batch]  # wrong: every draw an example
        each = clipper.clipped_sum(*draws[:2], draws[2][:, None], draws[3][:, None]).gradients
        size = sum(float(g.square().sum()) for g in each.values()) ** 0.5
    if clip < 1:
        assert size > 2 * clip, "the wrong mechanism would have been seen"
