"""Canaries: worst-case patterns and public images, their coins, and who they may not be."""

import numpy as np
import pytest
from auditkit import RELEASE, SHARED, shared_run
from scipy import stats

from dpsynth.assess.audit.canaries import (
    canary_codes,
    draw_canaries,
    fair_coins,
    mark,
    patterns,
)
from dpsynth.errors import UsageError
from dpsynth.planning.schema import HashHeldOut
from dpsynth.private.lattice import CODE_MAX
from dpsynth.public.projection import load_release_space
from dpsynth.public.sources import read_public
from dpsynth.vault import Record, open_private
from dpsynth.vault.split import is_held_out


@pytest.fixture(scope="module")
def run():
    return shared_run(SHARED, RELEASE)


@pytest.fixture(scope="module")
def space(run):
    return load_release_space(run.run, run.plan).representation


def test_patterns_lie_on_the_ball_and_point_apart(space):
    labels = np.arange(200) % 10
    images = patterns(space, labels)
    codes = space.encode_exact_many(images)
    norms = np.linalg.norm(codes, axis=1)
    assert np.mean(norms >= space.radius) > 0.9
    clipped = codes * np.minimum(1, space.radius / norms)[:, None] / space.radius
    first = clipped[labels == 0][: space.dim]  # one basis; a class has as many directions as d
    gram = np.abs(first @ first.T)
    assert gram[~np.eye(len(first), dtype=bool)].mean() < 0.25
    assert gram.diagonal().min() > 0.7
    assert images.dtype == np.uint8 and images.shape == (200, 8, 8, 1)


def test_all_canaries_differ_and_none_is_held_out(run, space):
    held_out, _ = open_private(run).held_out.arrays()
    marks = frozenset(map(mark, held_out))
    images, labels = draw_canaries(run.plan, space, 300, "patterns", marks)
    assert len({image.tobytes() for image in images}) == 300
    assert not marks & set(map(mark, images))
    rule = run.plan.private.held_out
    sides = (is_held_out(Record(i, y), rule) for i, y in zip(images, labels.tolist(), strict=True))
    assert not any(sides)
    assert np.bincount(labels).tolist() == [30] * 10


def test_a_canary_that_is_a_held_out_record_is_changed(run, space):
    images, _ = draw_canaries(run.plan, space, 50, "patterns", frozenset())
    again, _ = draw_canaries(run.plan, space, 50, "patterns", frozenset([mark(images[7])]))
    changed = [not np.array_equal(a, b) for a, b in zip(images, again, strict=True)]
    assert changed == [place == 7 for place in range(50)]
    assert np.abs(images[7].astype(int) - again[7].astype(int)).max() == 1


def test_public_canaries_are_public_images(run, space):
    public = {image.tobytes() for image in read_public(run.plan).images}
    images, _ = draw_canaries(run.plan, space, 60, "public", frozenset())
    found = sum(image.tobytes() in public for image in images)
    assert 40 <= found <= 60  # those that the plan would hold out are changed by a bit
    with pytest.raises(UsageError, match="different images"):
        draw_canaries(run.plan, space, 1_000, "public", frozenset())


def test_no_plan_can_hold_out_every_canary_unseen(run, space):
    rule = HashHeldOut(by="hash", fraction=0.999999, salt="all")
    plan = run.plan.model_copy(
        update={"private": run.plan.private.model_copy(update={"held_out": rule})}
    )
    with pytest.raises(UsageError, match="does not hold out"):
        draw_canaries(plan, space, 50, "patterns", frozenset())


@pytest.mark.parametrize("count", [0, 49, 2_001])
def test_numbers_out_of_range_are_refused(run, space, count):
    with pytest.raises(UsageError, match="expected 50 to 2000"):
        draw_canaries(run.plan, space, count, "patterns", frozenset())


def test_coins_are_fair_independent_and_fresh():
    tosses = np.stack([fair_coins(200) for _ in range(100)])
    assert stats.binomtest(int(tosses.sum()), tosses.size).pvalue > 1e-6
    pairs = int((tosses[1:] == tosses[:-1]).sum())
    assert stats.binomtest(pairs, tosses[1:].size).pvalue > 1e-6
    beside = int((tosses[:, 1:] == tosses[:, :-1]).sum())
    assert stats.binomtest(beside, tosses[:, 1:].size).pvalue > 1e-6


def test_codes_are_those_of_the_mechanism_in_order(run, space):
    images, labels = draw_canaries(run.plan, space, 60, "patterns", frozenset())
    units = canary_codes(space, images, labels, 10)
    assert units.labels.tolist() == labels.tolist() and units.sizes is None
    assert (np.square(units.codes.astype(np.int64)).sum(axis=1) <= CODE_MAX**2).all()
    exact = space.encode_exact_many(images)
    shrink = np.minimum(1, space.radius / np.linalg.norm(exact, axis=1))[:, None]
    wanted = exact * shrink * (CODE_MAX / space.radius)
    assert np.abs(units.codes - wanted).max() <= 1.01
