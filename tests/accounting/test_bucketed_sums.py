"""Sums with a clip for each time bucket: their steps, their event, and its epsilon."""

import json
import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.checks import AccountingError
from dpsynth.accounting.compose import coarse_epsilon, cross_check, epsilon, event_for
from dpsynth.accounting.events import ComposedEvent, GaussianEvent, PoissonGaussianEvent
from dpsynth.accounting.merging import merge
from dpsynth.accounting.statistics import (
    BucketedGradientSums,
    ClippedGradientSum,
    sensitivity,
    statistic_from_json,
)
from dpsynth.errors import ReplayError

CLIPS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=5).map(tuple)


@given(CLIPS, st.integers(1, 40))
def test_steps_take_the_buckets_in_turn(clips: tuple[float, ...], steps: int) -> None:
    statistic = BucketedGradientSums(clips)
    taken = [statistic.clip_of(step) for step in range(steps)]
    assert statistic.steps_by_clip(steps) == {clip: taken.count(clip) for clip in taken}


@given(CLIPS, st.integers(1, 40), st.floats(0.3, 20))
def test_the_event_has_each_step_with_its_own_noise_over_clip(clips, steps, noise) -> None:
    event = event_for(BucketedGradientSums(clips), noise, 0.1, steps)
    one_by_one = [
        event_for(ClippedGradientSum(clips[step % len(clips)]), noise, 0.1, 1)
        for step in range(steps)
    ]
    assert merge([event]) == merge(one_by_one)
    assert event.noise_multiplier == min(one.noise_multiplier for one in one_by_one)


def test_equal_clips_are_one_clip() -> None:
    uniform = event_for(BucketedGradientSums((0.5,) * 4), 1.0, 0.05, 30)
    assert uniform == ComposedEvent((event_for(ClippedGradientSum(0.5), 1.0, 0.05, 30),))


def test_composition_is_that_of_the_library_by_itself() -> None:
    """Every step on its own through dp-accounting's accountant, none of our merging."""
    clips, noise, rate = (0.6, 1.1, 1.4), 1.3, 0.05
    event = event_for(BucketedGradientSums(clips), noise, rate, 14)
    bounds = epsilon([event, GaussianEvent(3.0)], 1e-5)
    oracle = PLDAccountant(value_discretization_interval=bounds.grid)
    oracle.compose(GaussianDpEvent(3.0))
    for step in range(14):
        one = GaussianDpEvent(noise / clips[step % 3])
        oracle.compose(PoissonSampledDpEvent(rate, one))
    assert bounds.pessimistic == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)
    checked = cross_check([event, GaussianEvent(3.0)], 1e-5, bounds)
    assert bounds.optimistic <= checked["rdp"]


def test_a_uniform_plan_of_the_largest_clip_spends_more_and_of_the_smallest_less() -> None:
    def spent(*clips: float) -> float:
        return coarse_epsilon([event_for(BucketedGradientSums(clips), 1.0, 0.1, 20)], 1e-5)

    assert spent(0.5, 0.5) < spent(0.5, 1.0) < spent(1.0, 1.0)


@settings(max_examples=30)
@given(CLIPS)
def test_it_survives_json(clips: tuple[float, ...]) -> None:
    statistic = BucketedGradientSums(clips)
    text = json.dumps(statistic.to_json())
    assert statistic_from_json(json.loads(text)) == statistic
    assert sensitivity(statistic) == max(clips)


@pytest.mark.parametrize(
    "bad",
    [[], [0.0], [-1.0], [math.nan], [math.inf], [True], ["1"], [None], [[1.0]], [10**400], 1.0,
     "11", None, {"0": 1.0}, [1.0] * 1001],
)  # fmt: skip
def test_damaged_clips_are_refused(bad: object) -> None:
    with pytest.raises(ReplayError, match="clips"):
        statistic_from_json({"kind": "bucketed-gradient-sums", "clips": bad})


@pytest.mark.parametrize("keys", [{}, {"clip": 1.0}, {"clips": [1.0], "counts": [5]}])
def test_other_keys_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ReplayError, match="has keys"):
        statistic_from_json({"kind": "bucketed-gradient-sums", **keys})


@pytest.mark.parametrize(
    ("rate", "steps"), [(None, None), (0.1, None), (None, 3), (0.0, 3), (1.5, 3), (0.1, 0)]
)
def test_it_is_of_sampled_steps_alone(rate, steps) -> None:
    with pytest.raises(AccountingError):
        event_for(BucketedGradientSums((1.0,)), 1.0, rate, steps)


def test_parts_are_checked_as_other_events_are() -> None:
    with pytest.raises(AccountingError):
        merge([ComposedEvent((PoissonGaussianEvent(0.0, 0.1, 3),))])
