"""The confusion matrix's statistic: its sensitivity, its spelling, and what it costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.accounting.checks import AccountingError
from dpsynth.accounting.compose import event_for
from dpsynth.accounting.events import GaussianEvent
from dpsynth.accounting.statistics import ConfusionMatrix, sensitivity, statistic_from_json
from dpsynth.errors import ReplayError
from dpsynth.planning.workload import coordinates

WEIGHT = st.floats(1e-3, 1e3)


@given(WEIGHT, WEIGHT, st.integers(1, 10_000))
def test_one_record_moves_one_cell_and_the_total(cell, total, classes):
    """By definition of the L2 norm of (cell, total), whatever the number of classes."""
    made = ConfusionMatrix(cell, total, classes)
    assert sensitivity(made) == pytest.approx(math.sqrt(cell * cell + total * total))
    assert statistic_from_json(made.to_json()) == made
    assert coordinates(made) == classes * classes + 1


def test_a_charge_is_one_plain_gaussian():
    made = ConfusionMatrix(0.8, 0.6, 10)
    assert event_for(made, 3.0) == GaussianEvent(3.0)


@pytest.mark.parametrize(
    "change",
    [{"cell": 0.0}, {"total": -1.0}, {"classes": 0}, {"classes": True}, {"cell": math.nan}],
)
def test_what_is_out_of_range_is_refused(change):
    spec = {"cell": 0.8, "total": 0.6, "classes": 10} | change
    with pytest.raises(AccountingError):
        ConfusionMatrix(**spec)
    with pytest.raises(ReplayError):
        statistic_from_json({"kind": "confusion-matrix", **spec})


def test_a_forged_sensitivity_is_no_key():
    spec = ConfusionMatrix(0.8, 0.6, 10).to_json() | {"sensitivity": 0.1}
    with pytest.raises(ReplayError):
        statistic_from_json(spec)
