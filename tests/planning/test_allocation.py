"""Shapes, scores and the profile of time buckets: facts that hold whatever the public data say."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.accounting.calibrate import round_up
from dpsynth.errors import PlanError, UsageError
from dpsynth.planning.allocation import (
    DIGITS,
    LATEST,
    Allocation,
    Profile,
    bucket_edges,
    clips_of,
    held_clips,
    profile_in,
    trains_from,
    utility,
)
from dpsynth.planning.candidates import TIE, Candidate, decide
from dpsynth.planning.training import Distillation, Train

NUMBERS = st.floats(1e-3, 1e3)


def profile(importance: list[float], *, low: float = 0.25, weights: int = 100) -> Profile:
    count = len(importance)
    ones = (1.0,) * count
    return Profile(0.25, bucket_edges(low, count), ones, ones, tuple(importance), weights)


PROFILES = st.lists(NUMBERS, min_size=1, max_size=6).map(profile)
BETAS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


def root_mean_square(numbers: tuple[float, ...]) -> float:
    return math.sqrt(sum(one * one for one in numbers) / len(numbers))


@given(PROFILES, BETAS, st.floats(1e-3, 1e3))
def test_a_shape_has_the_reference_in_root_mean_square(made, beta, reference) -> None:
    clips = clips_of(made, beta, reference)
    assert root_mean_square(clips) == pytest.approx(reference, rel=1e-5)
    order = sorted(range(len(clips)), key=made.importance.__getitem__)
    assert [clips[k] for k in order] == sorted(clips)
    if beta == 0:
        assert set(clips) == {reference}
    for clip in clips[1:]:  # ratios are those of the public standard deviations, to a power
        ratio = made.importance[clips.index(clip)] / made.importance[0]
        assert clip / clips[0] == pytest.approx(ratio ** (beta / 2), rel=2e-4)


@given(PROFILES, BETAS, st.floats(0, 10), st.floats(1, 10), st.floats(1e-3, 1e3))
def test_utility_is_a_share_that_noise_takes_from(made, beta, noise, more, scale) -> None:
    clips = clips_of(made, beta, 1.0)
    value = utility(made, clips, noise, 1.0)
    assert 0 <= value <= 1 + 1e-12
    assert utility(made, clips, 0.0, 1.0) == pytest.approx(1)
    assert utility(made, clips, noise * more, 1.0) <= value + 1e-12
    # Whatever unit clips and noise are in, and whatever that of the profile is.
    scaled = tuple(clip * scale for clip in clips)
    assert utility(made, scaled, noise * scale, scale) == pytest.approx(value, abs=1e-9)
    rescaled = profile([one * scale for one in made.importance])
    assert utility(rescaled, clips, noise, 1.0) == pytest.approx(value, abs=1e-9)


@given(PROFILES, st.floats(1e-3, 10), st.floats(1, 100))
def test_a_larger_clip_helps_up_to_a_gradients_size_and_no_further(made, noise, more) -> None:
    size = clips_of(made, 1.0, 1.0)  # gradients of that size are never clipped
    small = tuple(one / 2 for one in size)
    assert utility(made, small, noise, 1.0) < utility(made, size, noise, 1.0)
    grown = tuple(one * more for one in size)
    assert utility(made, grown, noise, 1.0) == pytest.approx(
        utility(made, size, noise, 1.0), rel=1e-4
    )


@given(PROFILES)
def test_a_profile_survives_json(made: Profile) -> None:
    found = profile_in({"profile": json.loads(json.dumps(made.to_json()))})
    assert found == made and found.digest == made.digest
    assert made.fits(len(made.importance), Distillation(horizon=0.25))
    assert not made.fits(len(made.importance) + 1, Distillation(horizon=0.25))
    assert not made.fits(len(made.importance), None)


def test_no_profile_is_none() -> None:
    assert profile_in({"tau": 0.3}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"extra": 1},
        {"tau": 0},
        {"weights": 0},
        {"weights": 1.5},
        {"weights": True},
        {"edges": [0.25, 0.5]},
        {"edges": [0.5, 0.25, LATEST]},
        {"edges": [-0.1, 0.25, LATEST]},
        {"edges": [0.25, 0.5, 1.5]},
        {"edges": []},
        {"importance": [1.0]},
        {"importance": [1.0, math.nan]},
        {"importance": [1.0, 0]},
        {"variance": "ab"},
        {"weight": None},
    ],
)
def test_a_damaged_profile_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="damaged"):
        Profile.from_json({**profile([1.0, 2.0]).to_json(), **change})
    for found in (None, [], 3, "profile"):
        with pytest.raises(UsageError):
            Profile.from_json(found)


@pytest.mark.parametrize(
    ("distillation", "tau", "expected"),
    [
        (None, 0.4, 0.0),
        (Distillation(), 0.4, 0.4),
        (Distillation(cap=0.3), 0.4, 0.3),
        (Distillation(horizon=0.7), 0.4, 0.7),
        (Distillation(horizon=1.0), 0.4, 0.4),
        (Distillation(horizon=1.0), 0.95, 0.9),
        (Distillation(), 0.95, 0.9),
    ],
)
def test_training_begins_where_teaching_ends(distillation, tau, expected) -> None:
    assert trains_from(distillation, tau) == expected


def test_the_family_has_the_uniform_plan_whatever_is_declared() -> None:
    assert Allocation(shapes=[0.7]).family == (0.0, 0.7)
    assert Allocation().family == (0.0, 0.25, 0.5, 0.75, 1.0)


def settings_of(**changes: object) -> Train:
    given = {"rate": 0.1, "steps": 8, "chunk": 4, "buckets": 2, "clip": 2.0}
    return Train(**given | {"allocation": Allocation(shapes=[0.5])} | changes)


def held(**changes: object) -> dict[str, object]:
    return {"profile": "a" * 64, "beta": 0.5, "clips": [1.0, math.sqrt(7)]} | changes


def test_clips_of_a_lock_are_read_where_they_may_be_the_plans() -> None:
    assert held_clips(held(), settings_of()) == (1.0, math.sqrt(7))
    assert held_clips(held(beta=0.0, clips=[2.0, 2.0]), settings_of()) == (2.0, 2.0)
    assert held_clips(held(profile=None, beta=0, clips=[2, 2]), settings_of()) == (2.0, 2.0)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        held(clips=[1.0]),
        held(clips=[1.0, math.sqrt(7), 2.0]),
        held(clips=[1.0, 2.0]),
        held(clips=[1.0, math.nan]),
        held(clips=[-1.0, math.sqrt(7)]),
        held(beta=0.25),
        held(beta="0.5"),
        held(beta=0),
        held(profile=None),
        held(profile="A" * 64),
        held(profile=3),
    ],
)
def test_other_clips_are_none_of_the_plans(found: object) -> None:
    assert held_clips(found, settings_of()) is None


def test_chunks_are_whole_rounds_of_the_buckets() -> None:
    with pytest.raises(ValueError, match="whole rounds of its time buckets"):
        settings_of(chunk=3)
    assert settings_of(chunk=6, steps=20).chunk == 6
    assert settings_of(chunk=9, steps=9).chunk == 9  # one chunk begins with the first bucket
    assert settings_of(chunk=3, allocation=None).chunk == 3


def candidate(beta: float, value: float | None) -> Candidate:
    return Candidate(beta, (1.0,), None, None if value is None else 1.0, value)


def test_the_uniform_plan_wins_ties() -> None:
    uniform = candidate(0.0, 0.5)
    for other in (candidate(1.0, 0.5), candidate(1.0, 0.5 * (1 + TIE / 2)), candidate(1.0, 0.4)):
        chosen, why = decide([uniform, other])
        assert chosen is uniform and why.startswith("uniform: no shape scores above")
    better = candidate(0.5, 0.6)
    chosen, why = decide([uniform, candidate(0.25, None), better, candidate(1.0, 0.6)])
    assert chosen is better and "beta 0.5 has the highest utility of 3 verified" in why


@settings(max_examples=50)
@given(st.lists(st.none() | st.floats(0, 1), max_size=5), st.floats(0, 1))
def test_the_choice_never_scores_below_uniform(values, uniform) -> None:
    made = [candidate(0.0, uniform)]
    made += [candidate(0.1 * number, value) for number, value in enumerate(values, start=1)]
    assert decide(made)[0].utility >= uniform


def test_without_a_verified_uniform_plan_there_is_no_choice() -> None:
    for first in (candidate(0.0, None), candidate(0.5, 0.9)):
        with pytest.raises(PlanError, match="uniform plan is not among"):
            decide([first, candidate(1.0, 0.9)])


def test_a_clip_has_six_digits_on_every_machine() -> None:
    for clip in clips_of(profile([1.0, 2.0, 30.0]), 0.75, 1 / 3):
        assert round_up(clip, DIGITS) == clip
