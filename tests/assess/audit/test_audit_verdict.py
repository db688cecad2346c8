"""The verdict in words, the attacks' own rules, and the picture."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import special

from dpsynth.assess.audit import attacks, picture, roc
from dpsynth.assess.audit.detector import Noise
from dpsynth.assess.audit.verdict import Allowed, Copies, Seen, judge
from dpsynth.assess.audit.worlds import (
    CONTROLS,
    Canaries,
    Coded,
    Observed,
    OwnRun,
    Reference,
    Statistic,
    WhiteBox,
    World,
)
from dpsynth.errors import UsageError
from dpsynth.planning.yaml_plan import load_plan

PLANS = Path(__file__).parents[3] / "plans"


def _seen(attack="moments", control=None, bound=0.4, world=None, **more):
    promised = 3.0 if control is None else 1.0
    facts = {"auc": 0.52, "auc_interval": (0.44, 0.60), **more}
    return Seen(world or control or "plan", control, attack, promised, 1e-5, bound, 0.95, **facts)


def _all(**bounds):
    """Results of an audit whose controls reach the bounds given, else 2.5."""
    found = [_seen(), _seen("gradients", bound=1.2, auc=0.7, auc_interval=(0.6, 0.8))]
    for name in CONTROLS:
        bound = bounds.get(name.replace("-", "_"), 2.5)
        found += [_seen("moments", name, 0.1), _seen("gradients", name, bound)]
    return found


def test_a_plan_that_keeps_its_promise_passes():
    verdict = judge(_all(), canaries=200)
    assert verdict.passed
    assert verdict.controls_seen == dict.fromkeys(CONTROLS, True)
    assert not verdict.leaked
    assert not verdict.missed
    text = verdict.text
    assert text.startswith("PASS.")
    assert "epsilon 3 at delta 1e-05" in text
    assert "200 canaries" in text
    assert "epsilon 1.2 (gradients), at 95% confidence" in text
    assert "gradients on plan guessed better than chance (AUC 0.700, 0.600 to 0.800)" in text
    assert "noise left out: seen by gradients: bound 2.5 where 1 is promised" in text
    assert "proves no privacy" in text
    assert "stays with the curator" in text
    assert "--public-data" in text


def test_a_verdict_on_public_data_says_that_it_may_be_published():
    text = judge(_all(), public=True).text
    assert "may be published" in text
    assert "stays with the curator" not in text


def test_a_bound_above_the_promise_fails_and_is_named():
    verdict = judge([*_all(), _seen("velocity-residual", bound=3.2)])
    assert not verdict.passed
    assert [one.attack for one in verdict.leaked] == ["velocity-residual"]
    assert verdict.text.startswith("FAIL: an attack saw more than the plan promises.")
    assert "ABOVE THE PROMISE: velocity-residual on plan shows epsilon of at least 3.2" in (
        verdict.text
    )
    assert not judge([*_all(), _seen(bound=math.inf)]).passed
    assert judge([*_all(), _seen(bound=3.0)]).passed  # at the promise, not above


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_that_no_attack_sees_fails_the_audit_itself(name):
    verdict = judge(_all(**{name.replace("-", "_"): 0.9}))
    assert not verdict.passed
    assert verdict.missed == (name,)
    assert not verdict.leaked
    assert "FAIL: the audit missed a fault that it had planted itself" in verdict.text
    assert "MISSED, the largest bound is 0.9 where 1 is promised" in verdict.text


def test_a_control_that_was_never_run_is_missed():
    verdict = judge([one for one in _all() if one.control != "no-clip"])
    assert verdict.missed == ("no-clip",)
    assert "contributions not clipped: MISSED, no attack looked at it" in verdict.text
    assert judge([_seen()], controls=()).passed


def test_every_world_of_a_control_must_be_seen():
    again = _seen("gradients", "no-noise", 0.2, world="no-noise-gradients")
    verdict = judge([*_all(), again])
    assert verdict.missed == ("no-noise",)
    assert "noise left out: MISSED in part: seen by gradients: bound 2.5" in verdict.text
    assert "MISSED, the largest bound is 0.2 where 1 is promised" in verdict.text
    verdict = judge([*_all(), replace(again, bound=1.3)])
    assert verdict.passed
    assert "bound 2.5 where 1 is promised; seen by gradients: bound 1.3" in verdict.text


def test_a_copied_record_is_seen_by_what_lies_in_the_output():
    found = [one for one in _all() if one.control != "copied-record"]
    copy = _seen("nearest-sample", "copied-record", 0.0, copies=Copies(1, 0))
    verdict = judge([*found, copy])
    assert verdict.passed
    assert "seen by nearest-sample: 1 canary copied" in verdict.text
    assert not judge([*found, replace(copy, copies=Copies(2, 2))]).passed
    assert judge([*found, replace(copy, bound=2.0)]).passed
    # In a plan as it is, a copy is told of, and the bound decides.
    told = judge([*_all(), _seen("nearest-sample", copies=Copies(1, 0))])
    assert told.passed
    assert "1 planted canary in the output as they are" in told.text


def test_too_little_noise_fails_though_no_bound_is_above():
    short = _seen(noise=Noise(0.5, 0.02))
    assert short.leaks
    verdict = judge([*_all(), short])
    assert not verdict.passed
    assert "TOO LITTLE NOISE: moments on plan finds 0.5 of the promised" in verdict.text
    assert judge([*_all(), _seen(noise=Noise(0.97, 0.02))]).passed


def test_the_promise_in_words_is_the_largest_advantage_of_epsilon_and_delta():
    """TPR - FPR where the lines of (epsilon, delta) meet, by a grid."""
    fpr = np.linspace(0, 1, 200_001)
    for epsilon, delta in ((3.0, 1e-5), (1.0, 0.01), (800.0, 1e-5)):
        top = np.exp(min(epsilon, 700))
        tpr = np.minimum(top * fpr + delta, 1 - (1 - delta - fpr) / top)
        one = Seen("plan", None, "moments", epsilon, delta, 0.1, 0.95, 0.5, (0.4, 0.6))
        text = judge([one], controls=()).text
        assert f"at most {min(1.0, (tpr - fpr).max()):.2f} above" in text


def test_the_exact_curve_promises_more_than_epsilon_and_delta():
    """Of a Gaussian mechanism: advantage 2 Phi(mu / 2) - 1, AUC Phi(mu / sqrt 2)."""
    fpr = np.r_[0.0, np.geomspace(1e-6, 1, 2000)]
    allowed = Allowed.under(fpr, special.ndtr(special.ndtri(fpr) + 0.72))
    assert allowed.advantage == pytest.approx(2 * special.ndtr(0.36) - 1, abs=1e-5)
    assert allowed.auc == pytest.approx(special.ndtr(0.72 / np.sqrt(2)), abs=1e-4)
    text = judge(_all(), allowed=allowed).text
    assert "at most 0.28 above" in text
    assert "its AUC at most 0.695" in text


_HALF = Allowed(advantage=0.3, auc=0.6941)


@pytest.mark.parametrize(
    ("auc", "interval", "words"),
    [
        (0.66, (0.58, 0.73), "as a finite epsilon allows"),
        (0.743, (0.668, 0.806), "above 0.695 as chance may carry so few canaries: its interval "
         "reaches down to 0.668"),
        (0.79, (0.71, 0.85), "its whole 95% interval above the 0.695 that the plan allows"),
    ],
)  # fmt: skip
def test_an_auc_is_told_beside_what_the_plan_allows(auc, interval, words):
    one = _seen("moments", auc=auc, auc_interval=interval)
    text = judge([one], controls=(), allowed=_HALF).text
    assert words in text
    assert ("finite epsilon" in text) is (auc <= _HALF.auc)
    assert "as a finite epsilon allows" in judge([one], controls=()).text  # nothing to compare with


def test_an_auc_against_the_promise_is_a_warning_and_no_failure():
    against = _seen("gradients", auc=0.79, auc_interval=(0.71, 0.85))
    broken = _seen("moments", "no-noise", 2.5, auc=1.0, auc_interval=(0.97, 1.0))
    verdict = judge([*_all(), against, broken], allowed=_HALF)
    assert verdict.passed and verdict.warned == (against,)  # a planted fault is none of the plan's
    assert verdict.to_json()["warned"] == [["plan", "gradients"]]
    assert verdict.text.startswith("PASS, WITH A WARNING.")
    assert "No attack saw more than the plan promises" not in verdict.text
    assert "WARNING, AGAINST THE PROMISE: gradients on plan (AUC 0.790, 0.710 to 0.850)" in (
        verdict.text
    )
    assert "3 attacks were tried" in verdict.text and "more canaries" in verdict.text
    assert not judge(_all(), allowed=_HALF).warned
    failed = judge([*_all(), against, _seen(bound=9.0)], allowed=_HALF)
    assert failed.text.startswith("FAIL") and failed.warned


def test_no_honest_world_or_several_promises_are_refused():
    with pytest.raises(UsageError, match="no verdict"):
        judge([_seen(control="no-noise")])
    with pytest.raises(UsageError, match="several promises"):
        judge([_seen(), replace(_seen(), promised=2.0)])


def test_the_verdict_goes_into_json():
    found = json.loads(json.dumps(judge([*_all(), _seen(bound=9.0)]).to_json()))
    assert found["leaked"] == [["plan", "moments"]]
    assert found["passed"] is False


class _Lazy(torch.nn.Module):
    """v = 0, plus a part that knows code 3 by heart if `learnt`."""

    def __init__(self, code=None):
        super().__init__()
        self.code = code

    def forward(self, x, t, y):
        if self.code is None:
            return torch.zeros_like(x)
        to = (self.code - x) / (1 - t)[:, None]  # the exact velocity towards that code
        near = (y == 3).float()[:, None]
        return near * to


def _world(**observed):
    rng = np.random.default_rng(0)
    m, d = 10, 4
    canaries = Canaries(
        images=rng.integers(0, 256, (m, 8, 8, 1), dtype=np.uint8),
        labels=np.arange(m),
        codes=rng.normal(size=(m, d)),
        included=rng.random(m) < 0.5,
    )
    plan = load_plan(PLANS / "digits.yaml")
    return World("plan", None, "records", plan, 3.0, 1e-5, 1.0, canaries, Observed(**observed))


def _everything():
    world = _world()
    rng = np.random.default_rng(1)
    blocks = tuple(
        Statistic(
            "moments",
            part,
            rng.normal(size=10 * w),
            np.zeros(10 * w),
            1.0,
            np.arange(10 * w).reshape(10, w),
            np.ones((10, w)),
        )
        for part, w in (("counts", 1), ("sums", 4))
    )
    gradients = WhiteBox(rng.normal(size=(6, 10)), np.ones(6), 1.0, 0.3)
    observed = Observed(
        blocks, gradients, _Lazy(torch.from_numpy(world.canaries.codes[3]).float()), 0.0,
        (world.canaries.images[2:5], np.arange(3)),
    )  # fmt: skip
    coins = np.arange(10) < 5
    references = tuple(Reference(each, _Lazy()) for each in (coins, ~coins))
    return replace(world, observed=observed, references=references)


def test_a_world_is_attacked_by_what_it_shows():
    names = [attack.name for attack in attacks.ATTACKS]
    assert len(set(names)) == len(names) == 8
    assert attacks.applicable(_world()) == []
    world = _everything()
    assert [attack.name for attack in attacks.applicable(world)] == names
    only = replace(world, observed=Observed(samples=world.observed.samples), references=())
    assert [attack.name for attack in attacks.applicable(only)] == ["nearest-sample"]
    assert attacks.copies_in(_world()) is None
    copies = attacks.copies_in(world)
    assert copies.included + copies.others == 3
    assert copies.included == world.canaries.included[2:5].sum()
    with pytest.raises(UsageError, match="does not apply"):
        attacks.ATTACKS[0].score(_world())


def test_no_attack_reads_which_canaries_are_included():
    world = _everything()
    other = replace(world, canaries=replace(world.canaries, included=~world.canaries.included))
    for attack in attacks.ATTACKS:
        scores = attack.score(world)
        assert scores.shape == (10,)
        assert np.isfinite(scores).all()
        assert (scores == attack.score(other)).all()


def test_each_part_of_a_world_gives_its_own_canary_away():
    world = _everything()
    by_name = {attack.name: attack for attack in attacks.ATTACKS}
    assert by_name["velocity-residual"].score(world).argmax() == 3
    assert by_name["likelihood-ratio"].score(world).max() >= 0
    assert set(np.argsort(by_name["nearest-sample"].score(world))[-3:]) == {2, 3, 4}
    both = by_name["moments-and-gradients"].score(world)
    parts = by_name["moments"].score(world) + by_name["gradients"].score(world)
    assert np.allclose(both, parts)


def test_scores_that_are_no_numbers_rank_in_the_middle():
    broken = attacks._Scored("x", lambda _: True, lambda _: np.r_[np.nan, np.arange(9.0)])
    scores = broken.score(_world())
    assert scores[0] == 4.0
    with pytest.raises(UsageError, match="scores of shape"):
        attacks._Scored("x", lambda _: True, lambda _: np.ones(3)).score(_world())


def test_times_of_residuals_begin_where_training_did():
    assert attacks.times_from(0.5) == pytest.approx((0.548, 0.644, 0.74, 0.836, 0.932))
    assert max(attacks.times_from(0.97)) < attacks.LATEST


def _coded(images, rng):
    labels = np.zeros(len(images), np.int64)
    return Coded(images, labels, rng.normal(size=(len(images), 4)))


def test_membership_of_a_runs_own_records():
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (120, 8, 8, 1), dtype=np.uint8)
    own = OwnRun(_coded(images[:60], rng), _coded(images[60:], rng), samples=(images[:40], None))
    (found,) = attacks.membership(own)
    assert found.attack == "nearest-sample"
    assert roc.auc(found.scores, found.member) == pytest.approx(40 / 60 + 0.5 * 20 / 60, abs=0.08)
    own = replace(own, model=_Lazy(), samples=None)
    (found,) = attacks.membership(own, _Lazy())
    assert found.attack == "velocity-residual"
    assert roc.auc(found.scores, found.member) == 0.5  # a model like its reference: all ties
    assert attacks.membership(replace(own, model=None)) == []


def test_the_picture_is_drawn_for_its_owner_alone(tmp_path):
    rng = np.random.default_rng(4)
    member = rng.random(200) < 0.5
    curves = [
        picture.Curve("moments", rng.normal(size=200) + 0.8 * member, member),
        picture.Curve("constant", np.zeros(200), member),
    ]
    fpr = np.geomspace(1e-4, 1, 100)
    promise = (np.r_[0.0, fpr], np.r_[0.0, special.ndtr(special.ndtri(fpr) + 1.2)])
    results = [*_all(no_noise=math.inf), _seen("nearest-sample", copies=Copies(1, 0), bound=3.4)]
    path = picture.draw(tmp_path / "audit.png", curves, promise, results)
    assert path.stat().st_mode & 0o777 == 0o600
    with Image.open(path) as image:
        assert min(image.size) > 400
        assert len(set(np.asarray(image.convert("L")).reshape(-1).tolist())) > 20
        assert "Software" not in image.info


def test_the_picture_hides_no_curve_and_names_every_world():
    member = np.arange(100) < 50
    scores = np.random.default_rng(6).normal(size=100) + member
    curves = [picture.Curve(f"plan: attack {n}", scores, member) for n in range(8)]
    fpr = np.geomspace(1e-4, 1, 50)
    results = [
        _seen(attack, control, world=world)
        for world, control in (("plan", None), ("no-noise-moments", "no-noise"),
                               ("no-noise-gradients", "no-noise"))
        for attack in ("moments", "moments-differences")
    ]  # fmt: skip
    figure = picture._figure(curves, (fpr, fpr), results, False)
    figure.draw_without_rendering()
    left, right = figure.axes
    legend = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == len(curves) + 3
    assert not any(legend.overlaps(axes.get_tightbbox()) for axes in (left, right))
    assert legend.x0 >= 0 and legend.y0 >= 0 and legend.x1 <= figure.bbox.x1
    assert [label.get_text() for label in right.get_yticklabels()] == [
        f"{one.world}: {one.attack}" for one in results
    ]


def test_curves_of_an_attack_at_the_limit_stray_as_far_as_is_drawn():
    rng = np.random.default_rng(5)
    fpr = np.r_[0.0, np.geomspace(1e-5, 1, 400)]
    promise = (fpr, special.ndtr(special.ndtri(fpr) + 0.72))
    member = np.arange(200) < 100
    rates, most = picture.strayed(promise, member)
    above = np.zeros(100)
    for _ in range(600):
        scores = rng.normal(size=200) + 0.72 * member
        others = np.sort(scores[100:])[::-1]
        above += (scores[:100, None] > others).mean(axis=0) > most
    assert rates[5] == 0.05
    # Rates are whole shares: what lies above is at most 2.5%, and not far below that.
    assert (above / 600)[:60].max() < 0.05
    assert 0.005 < (above / 600)[:60].mean() < 0.035
