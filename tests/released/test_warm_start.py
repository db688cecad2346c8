"""A warm start on central images, and the file they come in."""

import math

import numpy as np
import pytest
import torch

from dpsynth.artifacts.central import ReleasedCentral, load_central, save_central
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.flow import euler
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.central import WarmUp
from dpsynth.planning.velocity import Velocity
from dpsynth.released.warm import warm_up

CLASSES, DIM = 3, 4


def central(seed=0, images=20, noise=0.05):
    rng = np.random.default_rng(seed)
    places = np.array([[2.0, 0, 0, 0], [0, -2.0, 0, 0], [0, 0, 1.0, 1.0]])
    codes = places[None] + rng.normal(size=(images, CLASSES, DIM)) * noise
    return ReleasedCentral(codes * 6.0, noise * 6.0, 0.1, 6.0, 2.5), places


def small():
    with seeded_initialisation(0):
        return build_velocity(Velocity(width=32, depth=1), DIM, CLASSES)


def test_the_model_learns_what_each_class_looks_like_and_the_start_stays():
    given, places = central()
    start = small()
    before = {name: value.clone() for name, value in start.state_dict().items()}
    done = []
    settings = WarmUp(steps=200, batch=60, learning_rate=3e-3, ema=0.9)
    learned = warm_up(
        start, given, settings, classes=CLASSES, seed=1, advance=lambda: done.append(1)
    )
    assert len(done) == 200
    assert all((value == before[name]).all() for name, value in start.state_dict().items())
    labels = torch.arange(CLASSES).repeat_interleave(100)
    noise = torch.randn(300, DIM, generator=generator(2))
    drawn = euler(learned, noise, labels, null=CLASSES, steps=20).reshape(CLASSES, 100, DIM)
    assert np.abs(drawn.mean(dim=1).numpy() - places).max() < 0.4
    again = warm_up(start, given, settings, classes=CLASSES, seed=1)
    first, second = learned.state_dict(), again.state_dict()
    assert all((first[name] == second[name]).all() for name in first)


def test_central_images_of_other_classes_are_refused():
    with pytest.raises(UsageError, match="classes"):
        warm_up(small(), central()[0], WarmUp(steps=1), classes=CLASSES + 1, seed=0)


def test_the_file_is_read_back_and_damage_is_named(tmp_path):
    given, places = central(noise=1e-9)
    save_central(tmp_path / "central.safetensors", given)
    read = load_central(tmp_path / "central.safetensors")
    assert read.codes[:CLASSES] == pytest.approx(places, abs=1e-7)
    assert read.labels[:4].tolist() == [0, 1, 2, 0]
    assert (read.std, read.rate, read.divisor, read.radius) == (given.std, 0.1, 6.0, 2.5)
    with pytest.raises(MissingError):
        load_central(tmp_path / "other.safetensors")
    sums = given.sums
    for wrong in (
        ReleasedCentral(sums[0], 1.0, 0.1, 1.0, 1.0),
        ReleasedCentral(sums * math.nan, 1.0, 0.1, 1.0, 1.0),
        ReleasedCentral(sums, 0.0, 0.1, 1.0, 1.0),
        ReleasedCentral(sums, 1.0, 1.5, 1.0, 1.0),
        ReleasedCentral(sums, 1.0, 0.1, math.inf, 1.0),
    ):
        with pytest.raises(UsageError):
            save_central(tmp_path / "x.safetensors", wrong)
