"""Probes and their confusion matrices on scikit-learn's digits, against scikit-learn's own."""

import json
import statistics
from collections.abc import Iterator

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from dpsynth.assess import probes
from dpsynth.assess.confusion import Confusion, confusion_of
from dpsynth.assess.probes import SEEDS, majority, probe_score, wide_score, wide_total
from dpsynth.errors import UsageError
from dpsynth.models import wide_resnet
from dpsynth.models.lenet import accuracy, train_probe
from dpsynth.models.wide_resnet import WideResNet

DIGITS = load_digits()
IMAGES = (DIGITS.images[..., None] * 15.9).astype(np.uint8)
LABELS = DIGITS.target.astype(np.int64)
TRAIN, HELD_OUT = (IMAGES[:600], LABELS[:600]), (IMAGES[1500:], LABELS[1500:])
NAMES = [str(i) for i in range(10)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wide_resnet, "LEAST_STEPS", 24)
    monkeypatch.setattr(wide_resnet, "SMALL", (10, 1))
    yield


def test_the_lenet_score_is_bit_for_bit_that_of_three_networks_by_themselves() -> None:
    steps: list[int] = []
    found = probe_score(TRAIN, HELD_OUT, 10, 12, steps.append)
    nets = [train_probe(*TRAIN, 10, steps=12, seed=seed) for seed in SEEDS]
    scores = [accuracy(net, *HELD_OUT) for net in nets]
    assert (found.mean, found.spread) == (statistics.fmean(scores), statistics.stdev(scores))
    assert sum(steps) == 36
    assert found.confusion.accuracy == pytest.approx(found.mean, abs=1e-15)
    assert found.hits.shape == LABELS[1500:].shape and set(found.hits * 3) <= {0, 1, 2, 3}
    assert found.hits.mean() == pytest.approx(found.mean)
    assert found.confusion.probes == 3
    again = Confusion.from_json(json.loads(json.dumps(found.to_json()))["confusion"])
    assert np.array_equal(again.counts, found.confusion.counts) and again.probes == 3


def test_per_class_values_are_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 400)  # class 5 has no record, class 6 neither and is never taken
    predicted = np.where(rng.random(400) < 0.6, labels, rng.integers(0, 6, 400))
    predicted[predicted == 2] = 3  # nor is class 2
    found = confusion_of(labels, predicted, 7)
    assert np.array_equal(found.counts, confusion_matrix(labels, predicted, labels=range(7)))
    precision, recall, _, support = precision_recall_fscore_support(
        labels, predicted, labels=range(7), zero_division=np.nan
    )
    rows = found.per_class([str(i) for i in range(7)])
    assert [row["count"] for row in rows] == support.tolist()
    for key, wanted in (("precision", precision), ("recall", recall)):
        mine = [np.nan if row[key] is None else row[key] for row in rows]
        assert np.allclose(mine, wanted, equal_nan=True)
    assert rows[5]["recall"] is None and rows[2]["precision"] is None
    both = found + found
    assert both.per_class([str(i) for i in range(7)]) == rows and both.probes == 2
    json.dumps(rows, allow_nan=False)


def test_what_no_matrix_can_be_made_of_is_refused() -> None:
    ok = np.array([0, 1])
    for labels, predicted in ((ok, ok[:1]), (ok[:0], ok[:0]), (ok, ok + 1), (ok - 1, ok)):
        with pytest.raises(UsageError):
            confusion_of(labels, predicted, 2)
    with pytest.raises(UsageError, match="3 class names for 2 classes"):
        confusion_of(ok, ok, 2).per_class(["a", "b", "c"])


def test_the_wide_score_learns_and_says_what_it_did() -> None:
    steps: list[int] = []
    found = wide_score(TRAIN, HELD_OUT, 10, epochs=3, seeds=(0, 1), progress=steps.append)
    assert sum(steps) == wide_total(600, 3, (0, 1)) == 48
    assert found.mean > 0.5 and found.spread is not None and found.confusion.probes == 2
    assert (found.network, found.n_train, found.n_split) == ("WRN-10-1", 540, 60)
    assert [len(values) for values in found.accuracies] == [3, 3] and set(found.epochs) <= {1, 2, 3}
    json.dumps(found.to_json(), allow_nan=False)
    assert wide_score(TRAIN, HELD_OUT, 10, epochs=1).spread is None


def test_held_out_records_choose_nothing_and_the_split_is_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = wide_resnet.train_wide

    def watched(train: tuple, split: tuple, classes: int, **settings: object) -> object:
        seen.append((train[0], split[0]))
        return original(train, split, classes, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(probes, "train_wide", watched)
    right = wide_score(TRAIN, HELD_OUT, 10, epochs=2)
    wrong = wide_score(TRAIN, (HELD_OUT[0], (HELD_OUT[1] + 1) % 10), 10, epochs=2)
    # Other held-out labels: the same networks and epochs, since nothing real is asked before.
    assert (right.epochs, right.accuracies) == (wrong.epochs, wrong.accuracies)
    assert right.mean != wrong.mean
    (train, split), (again, _) = seen
    assert np.array_equal(train, again)
    rows = {image.tobytes() for image in train}
    assert len(split) == 60 and not any(image.tobytes() in rows for image in split)


def test_more_images_than_the_most_are_a_random_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "WIDE_MOST", 100)
    found = wide_score(TRAIN, HELD_OUT, 10, epochs=1)
    assert (found.n_train, found.n_split) == (90, 10)
    assert wide_total(600, 1) == wide_total(100, 1)


def test_full_is_the_public_benchmarks_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wide_resnet.FULL == (40, 4)
    monkeypatch.setattr(wide_resnet, "FULL", (16, 1))
    assert wide_score(TRAIN, HELD_OUT, 10, epochs=1, full=True).network == "WRN-16-1"
    assert WideResNet(10).name == "WRN-16-2"


@pytest.mark.parametrize(
    ("count", "settings"), [(9, {}), (600, {"epochs": 0}), (600, {"seeds": ()})]
)
def test_too_little_is_refused(count: int, settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="it needs 10 images or more"):
        wide_score((IMAGES[:count], LABELS[:count]), HELD_OUT, 10, **settings)  # type: ignore[arg-type]


def test_the_constant_answer_counts_declared_classes() -> None:
    assert majority(np.array([2, 2, 1]), 4) == pytest.approx(2 / 3)
