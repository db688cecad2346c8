"""LL0 of a wavelet as typed: projected and guided; distilled and trained by DP-SGD."""

from pathlib import Path

import numpy as np
import pytest
from clikit import Typed
from wavelet_runs import assert_all_went_well, played

from dpsynth.artifacts.samples import read_samples

NAMES = ("guided", "flow")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Typed]]:
    """The folder of all runs, and how each line ended."""
    folder = tmp_path_factory.mktemp("wavelet")
    return folder, played(folder, NAMES)


def test_from_plan_to_replay(story: tuple[Path, dict[str, Typed]]) -> None:
    assert_all_went_well(*story, NAMES)


def test_samples_are_made_of_squares(story: tuple[Path, dict[str, Typed]]) -> None:
    """Haar with details of zero: each 2x2 square of an unaltered sample is of one grey."""
    folder, _ = story
    names = [str(digit) for digit in range(10)]
    for run in ("flow", "guided"):
        images, labels = read_samples(folder / f"runs/{run}/released/samples", names)
        assert images.shape == (40, 8, 8, 1)
        assert sorted(set(labels.tolist())) == list(range(10))
        squares = images.reshape(40, 4, 2, 4, 2)
        assert np.array_equal(squares.max((2, 4)), squares.min((2, 4)))
