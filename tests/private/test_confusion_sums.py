"""A search for a neighbour that moves the confusion matrix further than its sensitivity says."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.statistics import ClassMoments, ConfusionMatrix, sensitivity
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError
from dpsynth.models.lenet import LeNet
from dpsynth.models.seeding import seeded_initialisation
from dpsynth.private.blocks import UP
from dpsynth.private.confusion import add_noise, exact_matrix, matrix_blocks
from dpsynth.private.noise import NoiseSource
from dpsynth.readers import Record
from dpsynth.released.probe import Probe

Y = 3
STATISTICS = [ConfusionMatrix(0.8, 0.6, Y), ConfusionMatrix(0.05, 0.9987, Y)]
# (label, answer): labels and answers that are none are among them.
ANSWERED = st.tuples(st.integers(-1, Y), st.integers(-1, Y + 1))
UNITS = st.lists(st.lists(ANSWERED, min_size=0, max_size=6), max_size=8)


class Held:
    """Units in memory; an image's first pixel is the answer that it gets, 0 for none."""

    def __init__(self, units, most):
        self.most, self._units = most, units

    def records(self):
        for unit in self._units:
            yield [
                Record(np.full((2, 2, 1), answer + 1, np.uint8), label) for label, answer in unit
            ]


def answer(image):
    return None if image[0, 0, 0] == 0 else int(image[0, 0, 0]) - 1


def exact(units, most, statistic=STATISTICS[0]):
    return exact_matrix(Held(units, most), answer, statistic)


def moved(units, unit, most, statistic):
    """Squared whitened move of the exact sums when `unit` joins `units`, as a Fraction."""
    before, after = (exact(part, most, statistic) for part in (units, [*units, unit]))
    cells = (after.cells - before.cells).reshape(-1).tolist()
    square = Fraction(statistic.cell) ** 2 * sum(x * x for x in cells)
    square += Fraction(statistic.total) ** 2 * (after.total - before.total) ** 2
    return square / 4**after.bits


def most_of(statistic):
    """The squared sensitivity; its float is rounded, which UP in the noise pays for."""
    return Fraction(sensitivity(statistic) * UP) ** 2


@settings(max_examples=100, deadline=None)
@given(UNITS, st.lists(ANSWERED, min_size=1, max_size=6), st.sampled_from(STATISTICS))
def test_no_unit_moves_more_than_the_sensitivity(units, unit, statistic):
    bound = most_of(statistic)
    assert moved(units, unit, 6, statistic) <= bound
    assert moved([part[:1] for part in units if part], unit[:1], None, statistic) <= bound


@pytest.mark.parametrize("statistic", STATISTICS)
def test_units_of_many_images_are_cut_and_hill_climbing_finds_no_way_past(statistic):
    """From many starts, one image of the unit changed at a time to what moves the matrix most."""
    rng = np.random.default_rng(0)
    bound, worst = most_of(statistic), Fraction(0)
    for _ in range(6):
        unit = [tuple(map(int, rng.integers(0, Y, 2))) for _ in range(int(rng.integers(2, 20)))]
        for place in range(len(unit)):
            options = [
                [*unit[:place], (y, c), *unit[place + 1 :]] for y in range(Y) for c in (0, 1)
            ]
            unit = max(options, key=lambda found: moved([], found, 32, statistic))
        worst = max(worst, moved([], unit, 32, statistic))
    assert worst <= bound
    assert worst > bound * Fraction(998, 1000)  # cut to the bound, and not far below it


def test_the_search_beats_a_wrong_claim():
    """Without the cut, two images of one unit in one cell would move it by two."""
    unit = [(0, 0), (0, 0)]
    twice = exact([[pair] for pair in unit], None)
    assert twice.cells[0, 0] == twice.total == 2
    once = exact([unit], 2)
    assert once.cells[0, 0] == once.total <= 2**once.bits


def test_a_unit_of_one_image_counts_whole():
    made = exact([[(1, 2)]], 5)
    assert made.cells[1, 2] == made.total == 2**made.bits
    assert made.cells.sum() == made.total


def test_units_of_several_are_the_same_in_any_order_and_company():
    rng = np.random.default_rng(1)
    units = [
        [tuple(map(int, rng.integers(0, Y, 2))) for _ in range(int(rng.integers(1, 5)))]
        for _ in range(2_100)  # more than are clipped at once
    ]
    whole = exact(units, 4)
    parts = [exact([unit], 4) for unit in units]
    backwards = exact([unit[::-1] for unit in units[::-1]], 4)
    assert np.array_equal(whole.cells, sum(part.cells for part in parts))
    assert np.array_equal(whole.cells, backwards.cells)
    assert whole.total == backwards.total == sum(part.total for part in parts)


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("units", [[], [[]], [[(-1, 0)]], [[(Y, 0)]], [[(0, -1)]], [[(0, Y)]]])
def test_nobody_and_undeclared_labels_add_nothing(units, most):
    made = exact(units, most)
    assert not made.cells.any()
    assert made.total == 0
    released = noised(made)
    assert released.cells.shape == (Y, Y)
    released.check()  # an empty side is released like any other


def slot(statistic=STATISTICS[0], std=2.0):
    return Slot(1, "evaluation", "confusion", statistic, std)


def probe():
    with seeded_initialisation(0):
        return Probe(LeNet(Y).eval(), "0" * 64, samples=1, steps=1)


def noised(made, source=None):
    blocks = matrix_blocks(slot(), several=made.bits > 0)
    return add_noise(made, blocks, probe(), source or NoiseSource())


def test_noise_is_drawn_afresh_for_every_entry():
    made = exact([[(0, 0)]] * 5, None)
    first, second = noised(made), noised(made)
    values = np.concatenate([one.cells.reshape(-1) for one in (first, second)])
    assert len({*values.tolist(), first.total, second.total}) == 2 * Y * Y + 2


@pytest.mark.parametrize("most", [None, 4])
def test_noise_is_what_the_slot_says(most):
    """1,800 draws of a cell, 200 of the total: deviations about sigma over their weights."""
    made = exact([[(0, 0)], [(1, 2)]], most)
    found = [noised(made) for _ in range(200)]
    cells = np.concatenate([one.cells.reshape(-1) for one in found])
    truth = np.tile((made.cells / 2.0**made.bits).reshape(-1), len(found))
    totals = np.array([one.total for one in found])
    assert found[0].cell_std == pytest.approx(2.0 / 0.8, rel=1e-6)
    assert found[0].total_std == pytest.approx(2.0 / 0.6, rel=1e-6)
    assert found[0].cell_std >= 2.0 / 0.8
    assert (cells - truth).std() == pytest.approx(2.5, rel=0.1)
    assert abs((cells - truth).mean()) < 5 * 2.5 / len(cells) ** 0.5
    assert totals.std() == pytest.approx(2.0 / 0.6, rel=0.25)


def test_another_statistic_is_refused():
    moments = ClassMoments(0.6, 0.64, 0.48, "class", classes=Y, dim=2)
    with pytest.raises(PlanError):
        matrix_blocks(slot(moments), several=False)
    with pytest.raises(PlanError, match="range"):
        matrix_blocks(slot(std=2.0**50), several=True)


def test_an_answer_is_of_its_record_alone():
    """The same image in any memory, after any other; not finite scores are no answer."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 9, 9, 1), dtype=np.uint8)
    asked = probe()
    answers = [asked.answer(image) for image in images]
    odd = np.zeros(9 * 9 + 3, np.uint8)
    for image, first in zip(images[::-1], answers[::-1], strict=True):
        odd[3:] = image.reshape(-1)
        assert asked.answer(odd[3:].reshape(9, 9, 1)) == first
    with torch.no_grad():
        asked.net.head.bias[1] = torch.nan
    assert asked.answer(images[0]) is None
