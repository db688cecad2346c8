"""Sensitivities of cross moments: a search finds no worse neighbour, and the bound is reached."""

import json
import math

import numpy as np
import pytest

from dpsynth.accounting.statistics import (
    CrossMoments,
    PaperCrossMoments,
    sensitivity,
    statistic_from_json,
)
from dpsynth.errors import ReplayError
from dpsynth.planning.workload import coordinates

JOINT = CrossMoments(0.48, 0.64, 0.6, features=3, dim=4)
PAPER = PaperCrossMoments(100, features=3, dim=4)


def upper(matrix):
    """Upper triangle, off-diagonal entries times sqrt(2)."""
    rows, columns = np.triu_indices(len(matrix))
    return matrix[rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2))


def clipped(row):
    return row / max(1.0, float(np.linalg.norm(row)))


def joint(row):
    z, f = clipped(row[:4]), clipped(row[4:7])
    parts = (upper(np.outer(f, f)), np.outer(z, f).ravel(), upper(np.outer(z, z)))
    return np.concatenate([w * p for w, p in zip((0.48, 0.64, 0.6), parts, strict=True)])


def paper(row):
    z, f = clipped(row[:4]), clipped(row[4:7])
    return np.concatenate([np.outer(z, f).ravel(), upper(np.outer(f, f))]) / PAPER.capacity


def replaced(row):
    return paper(row[:7]) - paper(row[7:])


@pytest.mark.parametrize(
    ("move", "size", "statistic", "share"),
    [(joint, 7, JOINT, 1.0), (paper, 7, PAPER, 0.5), (replaced, 14, PAPER, 0.7499)],
)
def test_no_neighbour_beats_the_sensitivity(move, size, statistic, share):
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(20):
        row, scale = rng.normal(size=size) * 10 ** rng.uniform(-1, 2), 1.0
        norm = np.linalg.norm(move(row))
        for _ in range(150):  # random-direction ascent
            tried = row + scale * rng.normal(size=size)
            found = np.linalg.norm(move(tried))
            row, norm, scale = (tried, found, 1.2 * scale) if found > norm else (
                row, norm, 0.97 * scale)  # fmt: skip
        worst = max(worst, norm)
    assert share * sensitivity(statistic) * (1 - 1e-6) <= worst
    assert worst <= sensitivity(statistic) * (1 + 1e-12)


def test_the_papers_constant_is_not_below_two_root_two():
    assert sensitivity(PaperCrossMoments(1, 3, 4)) ** 2 >= 8
    assert sensitivity(PAPER) == pytest.approx(2 * math.sqrt(2) / 100)


@pytest.mark.parametrize("statistic", [JOINT, PAPER])
def test_statistics_come_back_from_json(statistic):
    spec = json.loads(json.dumps(statistic.to_json()))
    assert statistic_from_json(spec) == statistic
    with pytest.raises(ReplayError):
        statistic_from_json(spec | {"features": 0})
    with pytest.raises(ReplayError):
        statistic_from_json(spec | {"sensitivity": 0.1})


def test_coordinates_count_upper_triangles():
    assert coordinates(JOINT) == 6 + 12 + 10
    assert coordinates(PAPER) == 6 + 12
