"""The statistic of a mean embedding: its wire form, and its sensitivity."""

import json
import math

import pytest

from dpsynth.accounting.queries import EmbeddingSums
from dpsynth.accounting.statistics import sensitivity, statistic_from_json
from dpsynth.errors import ReplayError

STATISTIC = EmbeddingSums(0.6, 0.8, classes=10, dim=10_000)


def test_it_survives_json():
    assert statistic_from_json(json.loads(json.dumps(STATISTIC.to_json()))) == STATISTIC
    assert STATISTIC.to_json()["kind"] == "embedding-sums"


def test_any_missing_added_or_damaged_key_is_refused():
    spec = STATISTIC.to_json()
    for key in spec:
        with pytest.raises(ReplayError):
            statistic_from_json({k: v for k, v in spec.items() if k != key})
        for bad in (0, -1, math.nan, math.inf, True, None, "1", [1], 10**400):
            with pytest.raises(ReplayError):
                statistic_from_json({**spec, key: bad})
    with pytest.raises(ReplayError, match="keys"):
        statistic_from_json({**spec, "sensitivity": 0.001})


@pytest.mark.parametrize(("classes", "dim"), [(1, 1), (10, 40_464), (62, 235_800)])
def test_its_sensitivity_holds_no_size(classes, dim):
    assert sensitivity(EmbeddingSums(0.3, 0.4, classes, dim)) == 0.5
