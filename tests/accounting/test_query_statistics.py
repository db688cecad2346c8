"""Statistics of votes and of central images: sensitivity, spelling, and what they cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.accounting.checks import AccountingError
from dpsynth.accounting.compose import epsilon, event_for
from dpsynth.accounting.events import GaussianEvent, PoissonGaussianEvent
from dpsynth.accounting.queries import CentralSums, EmbeddingSums, VoteHistogram
from dpsynth.accounting.statistics import ConfusionMatrix, sensitivity, statistic_from_json
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import ReplayError
from dpsynth.planning.central import Central
from dpsynth.planning.charges import read_charges
from dpsynth.planning.evolution import Evolution

COUNT = st.integers(1, 10_000)


@given(COUNT, COUNT)
def test_one_record_moves_either_by_one(classes, dim):
    for made in (VoteHistogram(dim), CentralSums(classes, dim)):
        assert sensitivity(made) == 1.0
        assert statistic_from_json(made.to_json()) == made


def test_rounds_of_votes_cost_what_one_gaussian_does():
    """T rounds of multiplier m sqrt(T) are one of m: sums of 1/sigma^2 (A16)."""
    rounds = [event_for(VoteHistogram(100), 4.0 * math.sqrt(10))] * 10
    assert rounds[0] == GaussianEvent(4.0 * math.sqrt(10))
    many, one = epsilon(rounds, 1e-5), epsilon([GaussianEvent(4.0)], 1e-5)
    assert many.pessimistic == pytest.approx(one.pessimistic, rel=1e-3)


def test_central_images_are_sampled_gaussians():
    event = event_for(CentralSums(10, 48), 5.0, 0.1, 50)
    assert event == PoissonGaussianEvent(5.0, 0.1, 50)
    with pytest.raises(AccountingError, match="expected rate and steps"):
        event_for(CentralSums(10, 48), 5.0)


@pytest.mark.parametrize(
    "made",
    [VoteHistogram(100), EmbeddingSums(0.6, 0.8, 10, 48), ConfusionMatrix(0.6, 0.8, 10)],
)
def test_what_sums_over_all_records_gains_nothing_by_a_rate(made):
    """A bare transcript has no lock to follow: a forged rate would make its charge look cheaper."""
    with pytest.raises(AccountingError, match="sum over all records"):
        event_for(made, 1.0, 0.01, 1)
    spec = {**Slot(1, "any", "any", made, 1.0).spec(), "rate": 0.01, "steps": 1}
    line = {"kind": "charge", "line": 2, "slot": 1, **spec}
    with pytest.raises(ReplayError, match="no accountant can read"):
        read_charges([line])


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "votes", "bins": 0},
        {"kind": "votes", "bins": 2.0},
        {"kind": "votes", "bins": True},
        {"kind": "votes", "bins": 10, "sensitivity": 0.1},
        {"kind": "central-sums", "classes": 10},
        {"kind": "central-sums", "classes": 10, "dim": -1},
    ],
)
def test_what_is_out_of_range_or_forged_is_refused(spec):
    with pytest.raises(ReplayError):
        statistic_from_json(spec)


def test_numbers_are_checked_where_they_enter():
    with pytest.raises(AccountingError):
        VoteHistogram(bins=0)
    with pytest.raises(AccountingError):
        CentralSums(classes=10, dim=0)


def test_settings_make_equal_rounds_of_declared_size():
    settings = Evolution(rounds=4, population=30)
    made = settings.releases(classes=10)
    assert [name for name, _, _ in made] == ["votes-01", "votes-02", "votes-03", "votes-04"]
    assert {statistic for _, statistic, _ in made} == {VoteHistogram(300)}
    assert sum(share for _, _, share in made) == pytest.approx(1)
    assert [settings.strength(n) for n in (1, 4)] == pytest.approx([0.55, 0.15])
    assert Evolution(rounds=1).strength(1) == pytest.approx(0.55)


@pytest.mark.parametrize(
    "keys",
    [
        {"rounds": 0},
        {"times": [0.8, 0.4]},
        {"times": [0.5, 1.0]},
        {"times": [math.nan, 0.5]},
        {"threshold": -1.0},
        {"features": "clip"},
        {"popluation": 5},
    ],
)
def test_an_evolution_that_makes_no_sense_is_refused(keys):
    with pytest.raises(ValueError):
        Evolution(**keys)


@pytest.mark.parametrize("keys", [{"rate": 1.5}, {"rate": 0.0}, {"images": 0}, {"clip": -1.0}])
def test_central_images_that_make_no_sense_are_refused(keys):
    with pytest.raises(ValueError):
        Central(**keys)
    assert Central(rate=0.25).divisor(400, 10) == 10.0
