"""A unit of several images, whole: it moves the clipped sum by at most the clip, on tokens too."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from test_token_task import CLIP, UPDATES, flat, ids_of, summed, task_of

from dpsynth.models.seeding import generator
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.noise import NoiseSource

SIZES = np.array([1, 5, 2, 9, 3])


def clipped(task, codes, kept):
    """The sum over the first `kept` units, whose images are chosen by the same coins."""
    count = int(SIZES[:kept].sum())
    units = UnitCodes(codes[:count], np.arange(count) % 10, SIZES[:kept])
    data = task.take([units])
    batch = task.work.batch(data, rate=1.0, step=0, noise=NoiseSource(), source=generator(5))
    return flat(summed(task, batch).gradients)


@pytest.mark.parametrize("update", UPDATES)
def test_a_whole_unit_moves_the_sum_by_at_most_the_clip(tmp_path, update):
    task = task_of(tmp_path, update, spread=3.0)
    settings = task.work.settings.model_copy(update={"multiplicity": 3, "label_dropout": 0.0})
    task.work = replace(task.work, settings=settings)
    codes = ids_of(int(SIZES.sum()), task)
    sums = [clipped(task, codes, kept) for kept in range(len(SIZES) + 1)]
    assert not sums[0].any()  # a batch without units, of three images each
    for before, after in pairwise(sums):
        assert 0.9 * CLIP < float((after - before).norm()) <= CLIP
