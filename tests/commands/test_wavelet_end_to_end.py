"""LL0 of a wavelet as typed: moments, cells and captions, released, sampled, replayed, audited."""

import json
from pathlib import Path

import numpy as np
import pytest
from clikit import Typed
from wavelet_runs import assert_all_went_well, played

from dpsynth.artifacts.samples import read_samples

NAMES = ("shared", "cells", "captions")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Typed]]:
    """The folder of all runs, and how each line ended."""
    folder = tmp_path_factory.mktemp("wavelet")
    return folder, played(folder, NAMES, "audit runs/shared --quick --json")


def test_from_plan_to_replay(story: tuple[Path, dict[str, Typed]]) -> None:
    assert_all_went_well(*story, NAMES)


def test_released_means_are_those_of_the_digits(story: tuple[Path, dict[str, Typed]]) -> None:
    """At epsilon 8 each class is drawn most like that class, in what tells it from the others."""
    from sklearn.datasets import load_digits

    folder, _ = story
    digits = load_digits()
    real = np.stack([digits.images[digits.target == y].mean(0) * 255 / 16 for y in range(10)])
    names = [str(digit) for digit in range(10)]
    images, labels = read_samples(folder / "runs/shared/released/samples", names)
    drawn = np.stack([images[labels == y, ..., 0].mean(0) for y in range(10)])
    own, other = (means.reshape(10, 64) - means.mean(0).reshape(64) for means in (drawn, real))
    assert (own @ other.T / np.linalg.norm(other, axis=1)).argmax(1).tolist() == list(range(10))


def test_the_audit_passes(story: tuple[Path, dict[str, Typed]]) -> None:
    assert json.loads(story[1]["audit"].out)["passed"] is True
