"""Which features a record's caption has, and what is asked before anything is charged."""

from pathlib import Path

import numpy as np
import pytest

from dpsynth.artifacts.rooms import RunDir
from dpsynth.distributed.ranks import ALONE
from dpsynth.errors import PlanError
from dpsynth.planning.schema import Plan
from dpsynth.private import captioned as module
from dpsynth.private.captioned import load_captioned
from dpsynth.private.encoding import UnitCodes
from dpsynth.public.features import CaptionFeatures

FACTS = {
    "name": "told",
    "budget": {"epsilon": 1.0, "delta": 1e-5},
    "private": {
        "source": {"kind": "digits"},
        "capacity": 100,
        "image": {"height": 8, "width": 8},
        "classes": ["a", "b"],
        "held_out": {"by": "hash", "fraction": 0.1},
    },
    "public": [{"kind": "letters", "count": 10}],
    "representation": {"kind": "pca", "code": 3},
    "stages": {"moments": {"covariance": "shared", "captions": {"features": "one-hot"}}},
}
FREE = {
    **FACTS,
    "private": {
        **FACTS["private"],
        "source": {"kind": "npz", "path": "x.npz", "captions": "c"},
        "captions": {"kind": "free"},
    },
    "velocity": {"kind": "mmdit"},
    "sampling": {"captions": "words.txt"},
    "stages": {
        "moments": {
            "covariance": "shared",
            "captions": {"features": "sentence", "encoder": "somewhere", "width": 2},
        }
    },
}


class Space:
    """Stands for the representation of the release space."""

    dim, radius = 3, 2.0


class Asked:
    """Processes that note what they were asked to agree on."""

    def __init__(self):
        self.what = []

    def require_same(self, what, value):
        self.what.append((what, value))


def words(texts):
    return np.array([[len(text), text.count("a")] for text in texts], float)


def features(plan, *, intercept=True, encode=None):
    table = np.eye(2) if encode is None else np.zeros((0, 2))
    known = {"a": 0, "b": 1} if encode is None else {}
    centre = np.full(2, 0.5)
    return CaptionFeatures("one-hot", centre, 1.5, intercept, table, known, encode)


@pytest.fixture
def loaded(monkeypatch):
    """`load_captioned` of these facts and features."""

    def load(facts, made, ranks=ALONE):
        monkeypatch.setattr(module, "load_features", lambda *_: made)
        return load_captioned(RunDir(Path("run")), Plan.model_validate(facts), Space(), ranks)

    return load


def chunk(labels, captions=None):
    return UnitCodes(np.zeros((len(labels), 3), np.int32), np.array(labels), None, captions)


def test_conditions_are_looked_up_in_one_table(loaded):
    ranks = Asked()
    found = loaded(FACTS, features(FACTS), ranks)
    assert (found.space.dim, found.space.features, found.space.constant) == (3, 3, True)
    assert found.space.radius == 2.0
    assert found.space.feature_radius == pytest.approx(1.5 * np.sqrt(1.25))
    rows = found.features_of(chunk([1, 0, 1]))
    np.testing.assert_array_equal(rows, [[0.75, -0.5, 0.5], [0.75, 0.5, -0.5], [0.75, -0.5, 0.5]])
    assert len(ranks.what) == 1
    assert len(ranks.what[0][1]) == 64


def test_free_captions_are_encoded_one_at_a_time_and_once(loaded):
    asked = []

    def encode(texts):
        asked.append(list(texts))
        return words(texts)

    found = loaded(FREE, features(FREE, encode=encode))
    asked.clear()
    texts = ("a", "banana", "a", "b")
    rows = found.features_of(chunk([0] * 4, texts))
    assert asked == [["a"], ["banana"], ["b"]]
    expected = features(FREE, encode=words).of(list(texts))
    np.testing.assert_array_equal(rows, expected)
    assert found.features_of(chunk([], ())).shape == (0, 3)


@pytest.mark.parametrize("intercept", [False, True])
def test_features_that_the_plan_does_not_declare_are_refused(loaded, intercept):
    captions = {"features": "one-hot", "intercept": not intercept}
    stages = {"moments": {"covariance": "shared", "captions": captions}}
    with pytest.raises(PlanError, match="the plan declares"):
        loaded({**FACTS, "stages": stages}, features(FACTS, intercept=intercept))


def test_a_plan_without_captions_has_none(loaded):
    plain = {**FACTS, "stages": {"moments": {}}}
    assert loaded(plain, None) is None
