"""Scores of a noisy confusion matrix: against dense linear algebra, and against the truth."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from spendkit import make_lock, make_run

from dpsynth.artifacts.confusion import NAME, ReleasedConfusion, save_confusion
from dpsynth.errors import UsageError
from dpsynth.released.matrix_picture import draw_matrix, row_shares
from dpsynth.released.scores import Share, estimated, refresh_scores, score, scores

TRUE = np.array([[180.0, 15, 5], [10, 240, 0], [30, 0, 120]])


def noisy(truth, cell_std, total_std, rng):
    return ReleasedConfusion(
        truth + rng.normal(0, cell_std, truth.shape),
        float(truth.sum() + rng.normal(0, total_std)),
        cell_std,
        total_std,
        "0" * 64,
        samples=10,
        steps=5,
        seed=0,
    )


def dense(matrix):
    """Cells and their covariance by textbook least squares: rows of the design, noise weights."""
    size = matrix.cells.size
    design = np.vstack([np.eye(size), np.ones((1, size))])
    weights = np.diag([matrix.cell_std**-2.0] * size + [matrix.total_std**-2.0])
    covariance = np.linalg.inv(design.T @ weights @ design)
    seen = np.append(matrix.cells.reshape(-1), matrix.total)
    return covariance @ design.T @ weights @ seen, covariance


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.1, 50), st.integers(1, 4), st.integers(0, 99))
def test_counts_and_errors_are_those_of_least_squares(cell_std, total_std, side, seed):
    rng = np.random.default_rng(seed)
    matrix = noisy(rng.uniform(0, 90, (side, side)), cell_std, total_std, rng)
    cells, covariance = dense(matrix)
    made = estimated(matrix)
    assert np.allclose(made.cells.reshape(-1), cells)
    ratio = float(rng.uniform())
    part, whole = np.zeros(side * side), np.zeros(side * side)
    whole[: int(rng.integers(1, side * side + 1))] = 1
    part[: int(rng.integers(1, int(whole.sum()) + 1))] = 1
    direct = (part - ratio * whole) @ covariance @ (part - ratio * whole)
    found = made.share_variance(ratio, int(part.sum()), int(whole.sum()))
    assert float(found) == pytest.approx(direct, rel=1e-6, abs=1e-9)
    assert made.std(side * side) == pytest.approx(math.sqrt(covariance.sum()))
    assert made.std(side * side) <= total_std


def test_without_noise_the_scores_are_the_matrixs_own():
    found = scores(noisy(TRUE, 1e-9, 1e-9, np.random.default_rng(0)), ["a", "b", "c"])
    assert found["accuracy"]["value"] == pytest.approx(np.trace(TRUE) / TRUE.sum(), abs=1e-6)
    for y, one in enumerate(found["per_class"]):
        assert one["recall"]["value"] == pytest.approx(TRUE[y, y] / TRUE[y].sum(), abs=1e-6)
        assert one["precision"]["value"] == pytest.approx(TRUE[y, y] / TRUE[:, y].sum(), abs=1e-6)
        assert one["recall"]["noise_error"] == 0
        assert one["recall"]["sampling_error"] > 0


def test_intervals_and_errors_hold_what_they_say():
    """600 releases of fresh held-out records: true shares inside about 95 times in 100."""
    rng, rates = np.random.default_rng(3), TRUE / TRUE.sum()
    truth = {"accuracy": np.trace(rates), "recall": rates[2, 2] / rates[2].sum()}
    inside, off, said = dict.fromkeys(truth, 0), {k: [] for k in truth}, {k: [] for k in truth}
    for _ in range(600):
        drawn = rng.multinomial(600, rates.reshape(-1)).reshape(3, 3).astype(float)
        found = scores(noisy(drawn, 6.0, 12.0, rng), ["a", "b", "c"])
        for key, one in {"accuracy": found["accuracy"], **found["per_class"][2]}.items():
            if key in truth:
                inside[key] += one["low"] <= truth[key] <= one["high"]
                off[key].append(one["value"] - truth[key])
                said[key].append(one["error"])
    for key in truth:
        assert 0.925 < inside[key] / 600 < 0.985, key
        assert np.std(off[key]) == pytest.approx(np.mean(said[key]), rel=0.15), key
        assert abs(np.mean(off[key])) < 0.01, key


@pytest.mark.parametrize("truth", [np.zeros((3, 3)), np.diag([200.0, 0, 0])])
def test_absent_classes_and_an_empty_side_have_no_score(truth):
    rng = np.random.default_rng(4)
    for _ in range(50):
        found = scores(noisy(truth, 3.0, 6.0, rng), ["a", "b", "c"])
        absent = found["per_class"][2]["recall"]
        if absent["value"] is None:  # noise hides whether there is any record
            assert (absent["error"], absent["low"], absent["high"]) == (None, 0.0, 1.0)
        assert 0 <= absent["low"] <= absent["high"] <= 1
        json.dumps(found, allow_nan=False)
    if not truth.any():
        values = [
            scores(noisy(truth, 3.0, 6.0, rng), ["a", "b", "c"])["accuracy"]["value"]
            for _ in range(50)
        ]
        assert values.count(None) > 40


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.integers(1, 9),
)  # fmt: skip
def test_any_counts_give_shares_between_0_and_1(above, below, std, part):
    matrix = noisy(np.zeros((3, 3)), std, std, np.random.default_rng(0))
    made = score(estimated(matrix), Share(above, below, part, 9))
    assert 0 <= made.low <= made.high <= 1
    if made.value is not None:
        assert 0 <= made.value <= 1
        assert made.error > 0
        assert math.isfinite(made.error)


def test_shares_of_rows_keep_what_noise_made_negative():
    assert row_shares(np.array([[9.0, 3.0], [-4.0, 2.0]])).tolist() == [[0.75, 0.25], [0.0, 0.0]]
    # The diagonal is the recall of the scores, with no bias from negative counts left out.
    assert row_shares(np.array([[40.0, -5.0, 15.0]] * 3))[0].tolist() == [0.8, 0.0, 0.3]
    assert not row_shares(np.full((2, 2), -1.0)).any()


@pytest.mark.parametrize("side", [1, 10, 40])
def test_the_picture_is_darkest_where_the_records_are(tmp_path, side):
    path = tmp_path / "matrix.png"
    names = [f"a rather long name {n}" for n in range(side)]
    draw_matrix(100 * np.eye(side), names, path, heads=["title"], stamp={"dpsynth": "synthetic"})
    with Image.open(path) as image:
        assert image.text["dpsynth"] == "synthetic"
        pixels = np.asarray(image.convert("RGB"))
    cell = 48 if side < 24 else 30
    dark = np.argwhere((pixels == (24, 70, 140)).all(axis=2))  # the ink of a whole row
    assert dark[:, 0].max() - dark[:, 0].min() >= (side - 1) * cell
    assert dark[:, 1].max() - dark[:, 1].min() >= (side - 1) * cell


def test_views_are_made_once_for_each_matrix(tmp_path):
    lock = make_lock()
    run = make_run(tmp_path / "run", lock)
    assert refresh_scores(run, lock) is None
    rng = np.random.default_rng(0)
    save_confusion(run.released / NAME, noisy(10 * np.eye(10), 1.0, 2.0, rng))
    first = refresh_scores(run, lock)
    view, picture = run.released / "evaluation.json", run.released / "confusion.png"
    assert json.loads(view.read_text()) == first
    assert first["stamps"]["dpsynth-demo"]
    times = [path.stat().st_mtime_ns for path in (view, picture)]
    assert refresh_scores(run, lock) == first
    assert [path.stat().st_mtime_ns for path in (view, picture)] == times
    view.write_text("{")
    assert refresh_scores(run, lock) == first
    drawn = picture.read_bytes()
    view.write_text(json.dumps({**first, "accuracy": {**first["accuracy"], "value": 0.999}}))
    picture.write_bytes(drawn + b"forged")
    assert refresh_scores(run, lock) == json.loads(view.read_text()) == first
    assert picture.read_bytes() == drawn
    save_confusion(run.released / NAME, noisy(10 * np.eye(10), 1.0, 2.0, rng))
    assert refresh_scores(run, lock) != first
    (run.released / NAME).unlink()
    assert refresh_scores(run, lock) is None
    assert not view.exists()
    assert not picture.exists()


def test_a_matrix_of_other_classes_is_refused():
    with pytest.raises(UsageError, match="3 classes"):
        scores(noisy(TRUE, 1.0, 1.0, np.random.default_rng(0)), ["a", "b"])
