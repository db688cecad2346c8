"""From cross moments to Gaussians: class means, a known linear model, and any noise at all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.artifacts.cross import ReleasedCross
from dpsynth.errors import UsageError
from dpsynth.planning.captions import CaptionRelease
from dpsynth.planning.release import Moments
from dpsynth.released.regression import Centred, Conditions, estimate_conditions, regression

DIM, RADIUS, CLASSES = 5, 20.0, 4


def plan(features="one-hot", ridge=1e-12, floor=1e-6, rank=None, **keys):
    keys |= {"encoder": "somewhere"} if features == "sentence" else {}
    release = CaptionRelease(features=features, ridge=ridge, **keys)
    return Moments(covariance="shared", captions=release, floor=floor, rank=rank)


def released(codes, features, *, constant=True, kind="tight", stds=(0.0, 0.0, 0.0), rng=None):
    """Moments of codes (n, d) and features (n, m) without their constant; noise of these stds."""
    longest = max(float(np.linalg.norm(features, axis=1).max(initial=0.0)), 1e-3)
    rows = np.concatenate([np.full((len(features), 1), longest), features], 1)
    rows = rows if constant else features
    blocks = [rows.T @ rows, codes.T @ rows, codes.T @ codes]
    if rng is not None:
        for number, std in enumerate(stds):
            block = blocks[number]
            noise = std * rng.normal(size=block.shape)
            blocks[number] = block + (noise if number == 1 else (noise + noise.T) / 2)
    beside = int(kind == "paper")
    return ReleasedCross(
        ff=(blocks[0] + blocks[0].T) / 2,
        zf=blocks[1],
        zz=(blocks[2] + blocks[2].T) / 2,
        count=np.full(beside, float(len(codes))),
        total=np.repeat(codes.sum(0, keepdims=True), beside, 0),
        ff_std=stds[0],
        zf_std=stds[1],
        zz_std=stds[2],
        count_std=0.0,
        total_std=0.0,
        radius=RADIUS,
        feature_radius=longest * np.sqrt(2) * (1 + 1e-12),
        constant=longest if constant else 0.0,
        sensitivity=kind,
    )


def with_constant(moments, table):
    first = np.full((len(table), 1), moments.constant)
    return np.concatenate([first, table], 1) if moments.constant else table


def one_hot(centre=True, classes=CLASSES):
    table = np.eye(classes)
    return table - np.linspace(0.5, 1.5, classes) / classes if centre else table


def some_classes(seed=0, n=400):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, n) ** 2 % CLASSES])
    means = rng.normal(size=(CLASSES, DIM)) * 2
    return means[labels] + rng.normal(size=(len(labels), DIM)) @ rng.normal(size=(DIM, DIM)), labels


SINGLE = [(y,) for y in range(CLASSES)]


@pytest.mark.parametrize(
    ("centre", "constant", "kind"),
    [
        (True, True, "tight"),
        (False, True, "tight"),
        (False, False, "tight"),
        (False, False, "paper"),
    ],
)
@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_one_hot_features_without_noise_give_the_class_release(
    centre, constant, kind, shrink, seed
):
    """Proposition B.10: means, shares and the pooled covariance are those of the classes."""
    codes, labels = some_classes(seed)
    table = one_hot(centre)
    moments = released(codes, table[labels], constant=constant, kind=kind)
    settings_ = plan(intercept=constant, centre=centre)
    found = estimate_conditions(
        moments,
        Conditions(with_constant(moments, table), SINGLE),
        settings_,
        len(codes),
        shrink=shrink,
    )
    means = np.stack([codes[labels == y].mean(0) for y in range(CLASSES)])
    np.testing.assert_allclose(found.means, means, atol=1e-7)
    residual = codes - means[labels]
    np.testing.assert_allclose(found.covariances[0], residual.T @ residual / len(codes), atol=1e-6)
    shares = np.bincount(labels, minlength=CLASSES) / len(codes)
    np.testing.assert_allclose(found.weights, shares, atol=1e-9)


def test_the_papers_intercept_is_the_global_mean():
    codes, labels = some_classes()
    table = np.eye(CLASSES) - np.bincount(labels, minlength=CLASSES) / len(labels)
    moments = released(codes, table[labels], constant=False, kind="paper")
    found = estimate_conditions(moments, Conditions(table, SINGLE), plan(), 1.0)
    means = np.stack([codes[labels == y].mean(0) for y in range(CLASSES)])
    np.testing.assert_allclose(found.means, means, atol=1e-7)


@pytest.mark.parametrize("constant", [True, False])
def test_it_recovers_a_known_linear_model(constant):
    rng = np.random.default_rng(1)
    slopes, mu0 = rng.normal(size=(DIM, 6)), rng.normal(size=DIM) * constant
    features = rng.normal(size=(60_000, 6)) @ rng.normal(size=(6, 6)) / 3 + 0.3 * constant
    own = np.diag([0.1, 0.2, 0.3, 0.4, 0.5])
    codes = mu0 + features @ slopes.T + rng.normal(size=(len(features), DIM)) @ np.sqrt(own)
    moments = released(codes, features, constant=constant)
    asked = features[:7]
    found = estimate_conditions(
        moments,
        Conditions(with_constant(moments, asked)),
        plan("sentence", intercept=constant),
        len(codes),
    )
    np.testing.assert_allclose(found.means, mu0 + asked @ slopes.T, atol=0.03)
    np.testing.assert_allclose(found.covariances[3], own, atol=0.02)
    np.testing.assert_allclose(found.weights, 1 / 7)


def test_ridge_acts_on_the_features_and_never_on_the_intercept():
    """Against a dense solve of (Mff + ridge n D) with D zero at the constant."""
    rng = np.random.default_rng(2)
    features, codes = rng.normal(size=(50, 3)) + 1, rng.normal(size=(50, DIM)) + 3
    moments = released(codes, features)
    asked = with_constant(moments, rng.normal(size=(4, 3)))
    penalty = 0.7 * 50 * np.diag([0.0, 1, 1, 1])
    dense = np.linalg.solve(moments.ff + penalty, moments.zf.T).T
    found = estimate_conditions(moments, Conditions(asked), plan("sentence", ridge=0.7), 50)
    np.testing.assert_allclose(found.means, asked @ dense.T, rtol=1e-9)


def test_slots_give_the_products_of_their_shares():
    rng = np.random.default_rng(3)
    fillings = [(i, j) for i in range(3) for j in range(2)]
    joint = np.outer([0.5, 0.3, 0.2], [0.9, 0.1])
    drawn = rng.choice(6, size=4_000, p=joint.ravel())
    plain = np.array([np.concatenate([np.eye(3)[i], np.eye(2)[j]]) for i, j in fillings])
    first, second = (np.array(fillings)[drawn].T[k] for k in range(2))
    expected = np.outer(np.bincount(first) / 4_000, np.bincount(second) / 4_000).ravel()
    codes = rng.normal(size=(4_000, DIM))
    # Without a constant, squares of centred indicators tell two values apart no more.
    for constant, table in ((True, plain - ([1 / 3] * 3 + [0.5] * 2)), (False, plain)):
        moments = released(codes, table[drawn], constant=constant)
        found = estimate_conditions(
            moments,
            Conditions(with_constant(moments, table), fillings),
            plan("slots", intercept=constant),
            4_000,
        )
        np.testing.assert_allclose(found.weights, expected, atol=1e-9)


def test_the_estimate_comes_to_the_plain_one_as_noise_goes_to_zero():
    codes, labels = some_classes()
    table, apart = one_hot(), []
    for level in (1.0, 1e-2, 1e-4, 1e-6):
        rng = np.random.default_rng(4)
        moments = released(codes, table[labels], stds=(level,) * 3, rng=rng)
        conditions = Conditions(with_constant(moments, table), SINGLE)
        exact = released(codes, table[labels])
        shrunk = estimate_conditions(moments, conditions, plan(ridge=1e-6), 1)
        plain = estimate_conditions(exact, conditions, plan(ridge=1e-6), 1, shrink=False)
        gaps = [np.abs(shrunk.means - plain.means).max(),
                np.abs(shrunk.covariances - plain.covariances).max(),
                np.abs(shrunk.weights - plain.weights).max()]  # fmt: skip
        apart.append(max(gaps))
    assert apart[-1] < 1e-5
    assert apart == sorted(apart, reverse=True)


def test_known_noise_makes_the_estimate_better():
    """One-hot features of equal classes: a direction without spread is noise over noise."""
    gains = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        codes, labels = some_classes(seed, 800)
        table = one_hot()
        moments = released(codes, table[labels], stds=(20.0, 60.0, 60.0), rng=rng)
        conditions = Conditions(with_constant(moments, table), SINGLE)
        truth = np.stack([codes[labels == y].mean(0) for y in range(CLASSES)])
        errors = [
            np.square(
                estimate_conditions(moments, conditions, plan(ridge=1e-3), 1, shrink=s).means
                - truth
            ).mean()
            for s in (True, False)
        ]
        gains.append(errors[0] / errors[1])
    assert np.median(gains) < 0.7


def test_eigenvalues_are_corrected_for_what_noise_adds():
    """X6: the largest eigenvalue of a spike and symmetric noise is too large by m std^2 / 2 spike.

    One column of cross moments along its eigenvector: W's size tells what it was divided by.
    """
    m, std, spike, seen, used = 100, 1.0, 30.0, [], []
    for seed in range(30):
        noise = np.random.default_rng(seed).normal(size=(m, m)) * std / 2
        spread = noise + noise.T  # std on the diagonal is sqrt(2) of that beside it
        spread[0, 0] += spike
        values, vectors = np.linalg.eigh(spread)
        centred = Centred(
            1.0, np.zeros(1), np.zeros(m), spread, vectors[:, -1:].T, np.zeros((1, 1))
        )
        slopes, _ = regression(centred, 1e-12, std, 0.0)
        seen.append(values[-1])
        used.append(1 / np.linalg.norm(slopes))
    assert np.mean(seen) == pytest.approx(spike + m * std**2 / 2 / spike, abs=0.5)
    assert np.mean(used) == pytest.approx(spike, abs=0.5)


@given(
    seed=st.integers(0, 10**6),
    level=st.floats(-3, 9),
    kind=st.sampled_from(["tight", "paper", "without a constant"]),
    n=st.sampled_from([0, 1, 300]),
    shrink=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_any_noise_gives_finite_positive_definite_gaussians(seed, level, kind, n, shrink):
    rng = np.random.default_rng(seed)
    constant, kind = kind == "tight", "paper" if kind == "paper" else "tight"
    rank = 2 if seed % 2 else None
    codes, labels = rng.normal(size=(n, DIM)) * 3, rng.integers(0, CLASSES, n)
    table = one_hot()
    moments = released(
        codes, table[labels], constant=constant, kind=kind, stds=(10.0**level,) * 3, rng=rng
    )
    found = estimate_conditions(
        moments,
        Conditions(with_constant(moments, table), SINGLE),
        plan(ridge=1e-3, rank=rank),
        1000.0,
        shrink=shrink,
    )
    assert np.isfinite(found.means).all()
    assert (np.linalg.norm(found.means, axis=1) <= RADIUS * (1 + 1e-12)).all()
    assert (np.linalg.eigvalsh(found.covariances) > 0).all()
    assert found.weights.sum() == pytest.approx(1)
    assert (found.weights > 0).all()


def test_what_does_not_fit_the_release_is_refused():
    codes, labels = some_classes()
    moments = released(codes, one_hot()[labels])
    with pytest.raises(UsageError, match="features of shape"):
        estimate_conditions(moments, Conditions(one_hot()), plan(), 1)
    table = with_constant(moments, one_hot())
    with pytest.raises(UsageError, match="slots of"):
        estimate_conditions(moments, Conditions(table, [(0,), (1,), (2,), (2,)]), plan(), 1)
    with pytest.raises(UsageError, match="with captions"):
        estimate_conditions(moments, Conditions(table), Moments(covariance="shared"), 1)
