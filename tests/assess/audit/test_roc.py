"""AUC, its intervals and points of the ROC curve against scikit-learn and slow counts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm
from sklearn.metrics import roc_auc_score, roc_curve

from dpsynth.assess.audit import roc
from dpsynth.errors import UsageError

# Few distinct scores, so that ties are the rule.
scored = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=60).filter(
    lambda rows: 0 < sum(kind for _, kind in rows) < len(rows)
)


def columns(rows):
    return np.array([float(s) for s, _ in rows]), np.array([kind for _, kind in rows])


@settings(max_examples=150, deadline=None)
@given(scored)
def test_auc_with_ties_is_scikit_learns_and_mann_whitneys(rows):
    scores, member = columns(rows)
    found = roc.auc(scores, member)
    assert found == pytest.approx(roc_auc_score(member, scores), abs=1e-12)
    pairs = member.sum() * (~member).sum()
    u = mannwhitneyu(scores[member], scores[~member], method="asymptotic").statistic
    assert found == pytest.approx(u / pairs, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(scored)
def test_the_curve_is_scikit_learns_and_its_area_the_auc(rows):
    scores, member = columns(rows)
    fpr, tpr = roc.curve(scores, member)
    theirs = roc_curve(member, scores, drop_intermediate=False)
    assert fpr == pytest.approx(theirs[0])
    assert tpr == pytest.approx(theirs[1])
    assert np.trapezoid(tpr, fpr) == pytest.approx(roc.auc(scores, member), abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(scored, st.sampled_from([0.0, 0.001, 0.1, 0.25, 0.29, 0.5, 0.99]))
def test_tpr_at_fpr_is_the_best_whole_tied_group_allowed(rows, asked):
    scores, member = columns(rows)
    point = roc.tpr_at_fpr(scores, member, asked)
    fpr, tpr = roc_curve(member, scores, drop_intermediate=False)[:2]
    assert point.tpr == pytest.approx(tpr[fpr <= asked + 1e-12].max())
    assert point.fpr <= asked + 1e-12
    low, high = point.tpr_interval
    assert low <= point.tpr <= high
    assert point.fpr_interval[0] <= point.fpr <= point.fpr_interval[1]


def test_a_point_that_too_few_others_can_show_says_so():
    scores, member = np.arange(400.0), np.arange(400) >= 200
    assert not roc.tpr_at_fpr(scores, member, 0.001).resolved
    assert roc.tpr_at_fpr(scores, member, 0.001).fpr_interval[1] > 0.01
    assert roc.tpr_at_fpr(scores, member, 0.005).resolved


def slow_delong(scores, member, level=0.95):
    """DeLong et al. 1988 by all pairs, on the logit scale."""
    own, others = scores[member], scores[~member]
    psi = (own[:, None] > others) + 0.5 * (own[:, None] == others)
    area = psi.mean()
    variance = psi.mean(1).var(ddof=1) / len(own) + psi.mean(0).var(ddof=1) / len(others)
    half = norm.ppf(0.5 + level / 2) * math.sqrt(variance) / (area * (1 - area))
    return [1 / (1 + math.exp(-(math.log(area / (1 - area)) + s * half))) for s in (-1, 1)]


def test_the_interval_is_delongs_by_all_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        member = rng.random(60) < 0.4
        scores = np.round(rng.normal(size=60) + member, 1)
        assert roc.auc_interval(scores, member) == pytest.approx(slow_delong(scores, member))


@pytest.mark.parametrize("area", [0.5, 0.7, 0.95])
def test_intervals_cover_and_the_bootstrap_agrees(area):
    rng, n, runs = np.random.default_rng(1), 60, 300
    shift, member = norm.ppf(area) * 2**0.5, np.arange(2 * n) < n
    inside, widths = np.zeros(2), np.zeros(2)
    for run in range(runs):
        scores = rng.normal(size=2 * n) + shift * member
        found = [
            roc.auc_interval(scores, member),
            roc.auc_bootstrap(scores, member, resamples=200, seed=run),
        ]
        inside += [low <= area <= high for low, high in found]
        widths += [high - low for low, high in found]
    assert inside[0] / runs >= 0.95 - 4 * (0.05 * 0.95 / runs) ** 0.5
    assert inside[1] / runs >= 0.87  # it is narrow near 1, which is why it is not the default
    assert widths[1] == pytest.approx(widths[0], rel=0.15)


@pytest.mark.parametrize(("scores", "area"), [([3, 4, 1, 2], 1.0), ([1, 2, 3, 4], 0.0)])
def test_complete_separation_has_an_interval_of_a_width(scores, area):
    member = np.array([True, True, False, False])
    assert roc.auc(scores, member) == area
    low, high = roc.auc_interval(scores, member)
    # Two disjoint pairs right: by chance 5% at an area of sqrt(0.05).
    assert high - low == pytest.approx(1 - 0.05**0.5)
    assert low <= area <= high


def test_constant_scores_give_a_half_and_know_little():
    member = np.arange(40) < 20
    low, high = roc.auc_interval(np.zeros(40), member)
    assert roc.auc(np.zeros(40), member) == 0.5
    assert low == pytest.approx(1 - high)
    assert low < 0.45
    assert roc.auc_bootstrap(np.zeros(40), member) == (0.5, 0.5)
    assert roc.tpr_at_fpr(np.zeros(40), member, 0.1).tpr == 0.0


def test_infinite_scores_are_ordered_and_seeds_repeat():
    scores = [math.inf, 1.0, -math.inf, 0.0]
    member = np.array([True, True, False, False])
    assert roc.auc(scores, member) == 1.0
    rng = np.random.default_rng(2)
    values, kinds = rng.normal(size=50), rng.random(50) < 0.5
    assert roc.auc_bootstrap(values, kinds, seed=3) == roc.auc_bootstrap(values, kinds, seed=3)


@pytest.mark.parametrize(
    ("scores", "member", "says"),
    [
        ([1.0, math.nan], [True, False], "NaN"),
        ([1.0, 2.0], [True, True], "both"),
        ([1.0, 2.0], [1, 0], "booleans"),
        ([1.0], [True, False], "each"),
    ],
)
def test_what_is_no_roc_is_refused(scores, member, says):
    for call in (roc.auc, roc.auc_interval, roc.curve):
        with pytest.raises(UsageError, match=says):
            call(scores, np.array(member))


def test_numbers_out_of_range_are_refused():
    scores, member = [1.0, 2.0, 3.0], np.array([True, False, False])
    with pytest.raises(UsageError, match="two members"):
        roc.auc_interval(scores, member)
    with pytest.raises(UsageError, match="fpr"):
        roc.tpr_at_fpr(scores, member, 1.0)
    with pytest.raises(UsageError, match="confidence"):
        roc.tpr_at_fpr(scores, member, 0.1, 1.0)
    with pytest.raises(UsageError, match="resamples"):
        roc.auc_bootstrap(scores, member, resamples=10)
