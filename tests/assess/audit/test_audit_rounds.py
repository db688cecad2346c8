"""The moment release of a world: what an adversary is shown, against sums written out by hand."""

from functools import cache

import numpy as np
import pytest
from auditkit import CAPTIONS, CELLS, PAPER, PAPER_CAPTIONS, RELEASE, SHARED, shared_run
from scipy import stats

from dpsynth.assess.audit.canaries import (
    ListedUnits,
    canary_codes,
    draw_canaries,
    fair_coins,
)
from dpsynth.assess.audit.controls import UNCLIPPED, RepeatedNoise, SilentNoise, unclipped
from dpsynth.assess.audit.records import private_records
from dpsynth.assess.audit.rounds import Population, release_rounds
from dpsynth.private.captioned import load_captioned
from dpsynth.private.encoding import encoded
from dpsynth.private.lattice import CODE_MAX
from dpsynth.private.noise import NoiseSource
from dpsynth.public.features import load_features
from dpsynth.public.projection import load_release_space
from dpsynth.vault import Record, open_private

PLANS = {"cells": CELLS, "shared": SHARED, "paper": PAPER}
CROSS = {"captions": CAPTIONS, "paper captions": PAPER_CAPTIONS}


def _released(kind, source, *, change=lambda units: units, canaries=120):
    run = shared_run((PLANS | CROSS)[kind], RELEASE)
    space = load_release_space(run.run, run.plan).representation
    records = private_records(run)
    images, labels = draw_canaries(run.plan, space, canaries, "patterns", records.marks)
    units = change(canary_codes(space, images, labels, 10))
    included, charged = fair_coins(canaries), list[str]()
    stream = records.stream(space)
    who = Population(stream.chunks, units, included)
    found = release_rounds(
        run.plan,
        run.lock,
        space.radius,
        who,
        source=lambda _: source,
        charge=lambda slot: charged.append(slot.name),
        captioned=load_captioned(run.run, run.plan, space),
    )
    chunks = list(stream.chunks())
    codes = np.concatenate([chunk.codes for chunk in chunks]) * (space.radius / CODE_MAX)
    records = codes, np.concatenate([chunk.labels for chunk in chunks])
    planted = units.codes * (space.radius / CODE_MAX), units.labels
    return found, charged, records, planted, included


def _expected(statistic):
    """Known sums with the included canaries' parts."""

    def with_parts(included):
        total = statistic.known.copy()
        np.add.at(total, statistic.places[included], statistic.values[included])
        return total

    return with_parts


def _class_sums(codes, labels, pooled):
    """Counts, sums, diagonals and upper triangles by class, written out in floating point."""
    row, column = np.triu_indices(codes.shape[1], k=1)
    groups = [np.ones(len(labels), bool)] if pooled else [labels == y for y in range(10)]
    seconds = [codes[mine].T @ codes[mine] for mine in groups]
    return {
        "counts": np.bincount(labels, minlength=10).astype(float),
        "sums": np.stack([codes[labels == y].sum(0) for y in range(10)]).ravel(),
        "diagonal": np.concatenate([second.diagonal() for second in seconds]),
        "off-diagonal": np.concatenate([second[row, column] for second in seconds]),
    }


@cache
def _silent(kind):
    return _released(kind, SilentNoise())


@pytest.mark.parametrize("kind", PLANS)
def test_known_sums_and_parts_are_those_of_the_records(kind):
    found, _, records, planted, _ = _silent(kind)
    pooled = kind != "cells"
    known = _class_sums(*records, pooled)
    blocks = [one for one in found.statistics if one.release == "moments"]
    assert [one.part for one in blocks] == list(known)
    for one in blocks:
        np.testing.assert_allclose(one.known, known[one.part], rtol=1e-9, atol=1e-6)
        alone = np.zeros(len(one.known))
        np.add.at(alone, one.places[3], one.values[3])
        single = _class_sums(planted[0][3:4], planted[1][3:4], pooled)
        np.testing.assert_allclose(alone, single[one.part], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", PLANS)
def test_without_noise_every_block_is_known_sums_and_included_parts(kind):
    found, charged, _, _, included = _silent(kind)
    assert len(found.statistics) == {"cells": 10, "shared": 4, "paper": 4}[kind]
    for one in found.statistics:
        wanted = _expected(one)(included)
        np.testing.assert_allclose(one.noisy, wanted, rtol=1e-9, atol=1e-6 * one.std)
        assert one.places.shape == one.values.shape and one.places.max() < len(one.noisy)
    wanted = {
        "cells": ["moments", "cells-lloyd-1", "cells"],
        "shared": ["moments"],
        "paper": ["moments-sums", "moments-second"],
    }
    assert charged == wanted[kind]


@pytest.mark.parametrize("kind", CROSS)
def test_caption_releases_are_outer_products_of_codes_and_features(kind):
    found, charged, records, planted, included = _silent(kind)
    run = shared_run(CROSS[kind], RELEASE)
    features = load_features(run.run, run.plan)
    table = features.of(run.plan.private.classes)
    if features.intercept:
        table[:, 0] = found.moments.constant

    def products(codes, labels):
        f = table[labels]
        ff, zf, zz = f.T @ f, codes.T @ f, codes.T @ codes
        beside = [[len(codes)], codes.sum(0)] if "paper" in kind else []
        row, column = np.triu_indices(len(ff), k=1)
        low, high = np.triu_indices(len(zz), k=1)
        parts = [*beside, ff.diagonal(), ff[row, column], zf.ravel(), zz.diagonal(), zz[low, high]]
        return [np.asarray(part, float) for part in parts]

    assert len(charged) == (3 if "paper" in kind else 1)
    known, single = products(*records), products(planted[0][3:4], planted[1][3:4])
    assert len(found.statistics) == len(known)
    for one, wanted, alone in zip(found.statistics, known, single, strict=True):
        np.testing.assert_allclose(one.known, wanted, rtol=1e-4, atol=0.1)  # whole steps
        np.testing.assert_allclose(one.values[3], alone, rtol=1e-3, atol=1e-3)
        exact = _expected(one)(included)
        np.testing.assert_allclose(one.noisy, exact, rtol=1e-9, atol=1e-6 * one.std)


@pytest.mark.parametrize("kind", PLANS | CROSS)
def test_noise_is_fresh_and_has_the_stated_deviation(kind):
    found, _, _, _, included = _released(kind, NoiseSource())
    left = [(one.noisy - _expected(one)(included)) / one.std for one in found.statistics]
    every = np.concatenate(left)
    assert stats.kstest(every, "norm").pvalue > 1e-6
    for one in left:
        assert stats.chi2.sf(np.square(one).sum(), len(one)) > 1e-7
        assert stats.chi2.cdf(np.square(one).sum(), len(one)) > 1e-7
    first, second = sorted(left, key=len)[-2:]
    assert abs(np.corrcoef(first, second[: len(first)])[0, 1]) < 0.9


def test_canaries_beside_units_of_several_images_count_whole():
    run = shared_run(SHARED, RELEASE)
    space = load_release_space(run.run, run.plan).representation
    images, labels = open_private(run).train.arrays()
    records = [Record(i, y) for i, y in zip(images[:300], labels[:300].tolist(), strict=True)]
    pairs = ListedUnits(tuple(zip(records[::2], records[1::2], strict=True)), most=2)
    chunks = list(encoded(pairs, space, 10))
    planted, marks = draw_canaries(run.plan, space, 60, "patterns", frozenset())
    included = fair_coins(60)
    who = Population(lambda: iter(chunks), canary_codes(space, planted, marks, 10), included, True)
    found = release_rounds(
        run.plan, run.lock, space.radius, who,
        source=lambda _: SilentNoise(), charge=lambda slot: None,
    )  # fmt: skip
    counts = found.statistics[0]
    assert 150 <= counts.known.sum() < 300 and not float(counts.known.sum()).is_integer()
    for one in found.statistics:
        wanted = _expected(one)(included)
        np.testing.assert_allclose(one.noisy, wanted, rtol=1e-9, atol=1e-6 * one.std)
    assert counts.values.max() == 1.0


def test_repeated_noise_is_one_sequence_in_every_block():
    found, _, _, _, included = _released("cells", RepeatedNoise())
    left = [(one.noisy - _expected(one)(included)) / one.std for one in found.statistics]
    longest = max(left, key=len)
    for one in left:
        np.testing.assert_allclose(one, longest[: len(one)], atol=1e-3)
    assert 0.8 < longest.std() < 1.2


def test_unclipped_canaries_add_more_than_the_statistic_bounds():
    honest, *_ = _silent("shared")
    found, _, _, _, included = _released("shared", SilentNoise(), change=unclipped)
    for before, one in zip(honest.statistics, found.statistics, strict=True):
        wanted = _expected(one)(included)
        np.testing.assert_allclose(one.noisy, wanted, rtol=1e-9, atol=1e-6 * one.std)
        factor = {"counts": 1, "sums": UNCLIPPED}.get(one.part, UNCLIPPED**2)
        np.testing.assert_allclose(one.values, factor * before.values, rtol=1e-9)
