"""The field of several components a class, against torch's own mixtures, a score and a flow."""

from typing import NamedTuple

import pytest
import torch
from field_checks import assert_regression
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from dpsynth.errors import UsageError
from dpsynth.models import field as module
from dpsynth.models.field import AnalyticField
from dpsynth.models.flow import euler, interpolate
from dpsynth.models.seeding import generator

CLASSES, DIM = 3, 4
OWNERS = torch.tensor([1, 0, 2, 1, 0, 1])
TIMES = [0.0, 1e-6, 0.25, 0.5, 0.9, 1 - 1e-3, 1.0]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Parts(NamedTuple):
    """What a field is made of, float64."""

    weights: Tensor
    means: Tensor
    covariances: Tensor
    owners: Tensor

    def at(self, index: Tensor) -> "Parts":
        return Parts(*(value[index] for value in self))

    def field(self, dtype: torch.dtype = torch.float64) -> AnalyticField:
        return AnalyticField(*self[:3], owners=self.owners, dtype=dtype)

    def density(self, t: float) -> MixtureSameFamily:
        """The distribution of x_t = (1 - t) xi + t z, by torch."""
        eye = torch.eye(self.means.shape[1], dtype=torch.float64)
        spread = (1 - t) ** 2 * eye + t**2 * self.covariances
        return MixtureSameFamily(
            Categorical(self.weights), MultivariateNormal(t * self.means, spread)
        )

    def draw(self, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes (n, d) and their components (n,)."""
        picked = torch.multinomial(self.weights, count, replacement=True, generator=source)
        normal = torch.randn(count, self.means.shape[1], generator=source, dtype=torch.float64)
        roots = torch.linalg.cholesky(self.covariances)
        return self.means[picked] + torch.einsum("bde,be->bd", roots[picked], normal), picked


def parts(spread: float = 1.0) -> Parts:
    source = generator(5)
    root = torch.randn(len(OWNERS), DIM, DIM, generator=source, dtype=torch.float64)
    means = spread * torch.randn(len(OWNERS), DIM, generator=source, dtype=torch.float64)
    weights = torch.tensor([0.3, 0.1, 0.2, 0.1, 0.25, 0.05], dtype=torch.float64)
    return Parts(
        weights, means, root @ root.mT / DIM + 0.05 * torch.eye(DIM, dtype=torch.float64), OWNERS
    )


def of_class(every: Parts, label: int) -> Parts:
    return every.at(every.owners == label)


def dense(x: Tensor, t: float, some: Parts) -> Tensor:
    """Equations 2 to 4 as printed, at one point x (d,): dense inverses, densities of torch."""
    mixture = some.density(t)
    log_shares = some.weights.log() + mixture.component_distribution.log_prob(x)
    spread = mixture.component_distribution.covariance_matrix
    gains = t * some.covariances @ torch.linalg.inv(spread)
    expected = some.means + torch.einsum("mde,me->md", gains, x - t * some.means)
    return (torch.softmax(log_shares, 0) @ expected - x) / (1 - t)


def points(count: int, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """Points (n, d), times (n,) and labels (n,), every class among them."""
    x = 2 * torch.randn(count, DIM, generator=generator(1), dtype=torch.float64)
    return x, torch.full((count,), t, dtype=torch.float64), torch.arange(count) % CLASSES


@pytest.mark.parametrize("t", TIMES[:-1])
def test_field_is_the_dense_mixture(t: float) -> None:
    every = parts()
    field = every.field()
    assert field.classes == CLASSES
    x, times, labels = points(12, t)
    expected = [dense(a, t, of_class(every, y)) for a, y in zip(x, labels.tolist(), strict=True)]
    torch.testing.assert_close(
        field.conditional(x, times, labels), torch.stack(expected), rtol=1e-8, atol=1e-8
    )
    expected = [dense(a, t, every) for a in x]
    torch.testing.assert_close(
        field.unconditional(x, times), torch.stack(expected), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("t", TIMES)
def test_responsibilities_are_those_of_the_classes(t: float) -> None:
    every = parts()
    x, times, _ = points(12, t)
    log_joint = [
        some.weights.sum().log() + some.density(t).log_prob(x)
        for some in (of_class(every, y) for y in range(CLASSES))
    ]
    expected = torch.softmax(torch.stack(log_joint, 1), 1)
    torch.testing.assert_close(every.field().responsibilities(x, times), expected, **CLOSE)


def test_noise_end_limits() -> None:
    every = parts()
    x, times, labels = points(CLASSES, 0.0)
    field = every.field()
    own = [of_class(every, y) for y in range(CLASSES)]
    means = torch.stack([some.weights @ some.means / some.weights.sum() for some in own])
    torch.testing.assert_close(field.conditional(x, times, labels), means - x)
    torch.testing.assert_close(field.unconditional(x, times), every.weights @ every.means - x)
    shares = torch.stack([some.weights.sum() for some in own])
    torch.testing.assert_close(field.responsibilities(x, times), shares.expand(CLASSES, -1))


def test_cells_enter_with_the_square_of_t() -> None:
    """Corollary 3.2 holds with the class's own mean and covariance, whatever its cells."""
    every, t = parts(), 1e-4
    x, times, labels = points(CLASSES, t)
    means, covariances = moment_matched(every)[1:]
    slope = (every.field().conditional(x, times, labels) - (means - x)) / t
    expected = means - x + torch.einsum("yde,ye->yd", covariances, x)
    torch.testing.assert_close(slope, expected, rtol=3e-3, atol=3e-3)


def test_field_solves_the_regression_of_equation_1() -> None:
    """E[z - xi | x_t] is the least-squares fit: its residual is uncorrelated with any f(x_t)."""
    every, source, count, t = parts(spread=2.0), generator(2), 300_000, 0.8
    field = every.field()
    codes, picked = every.draw(count, source)
    labels = OWNERS[picked]
    noise, times, x = assert_regression(field, codes, labels, t, source)
    # A single Gaussian a class, of the same moments, is not the fit: the test can fail.
    single = AnalyticField(*moment_matched(every), dtype=torch.float64)
    residual = codes - noise - single.conditional(x, times, labels)
    assert (residual[:, :, None] * x.sin()[:, None, :]).mean(0).abs().max() > 0.03


def moment_matched(every: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """One Gaussian a class with its mixture's mean and covariance."""
    weights, means, covariances = [], [], []
    for some in (of_class(every, y) for y in range(CLASSES)):
        shares = some.weights / some.weights.sum()
        mean = shares @ some.means
        offsets = some.means - mean
        between = torch.einsum("m,md,me->de", shares, offsets, offsets)
        weights.append(some.weights.sum())
        means.append(mean)
        covariances.append(torch.einsum("m,mde->de", shares, some.covariances) + between)
    return torch.stack(weights), torch.stack(means), torch.stack(covariances)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9, 1.0])
def test_field_is_the_score(t: float) -> None:
    """v = (x + (1 - t) grad log p_t(x)) / t, the gradient by central differences."""
    every, step = parts(), 1e-5
    x, times, labels = points(6, t)
    field = every.field()

    def flow(some: Parts, at: Tensor) -> Tensor:
        density, eye = some.density(t), torch.eye(DIM, dtype=torch.float64)
        rise = [density.log_prob(at + step * e) - density.log_prob(at - step * e) for e in eye]
        return (at + (1 - t) * torch.stack(rise, -1) / (2 * step)) / t

    torch.testing.assert_close(field.unconditional(x, times), flow(every, x), rtol=1e-5, atol=1e-5)
    expected = torch.stack(
        [flow(of_class(every, int(y)), a) for a, y in zip(x, labels, strict=True)]
    )
    torch.testing.assert_close(field.conditional(x, times, labels), expected, rtol=1e-5, atol=1e-5)


def test_guidance_climbs_the_class_posterior() -> None:
    """v(x, t | y) - v(x, t) = (1 - t) / t grad log w_y(x, t)."""
    field, t = parts().field(), 0.4
    x, times, labels = points(6, t)
    x.requires_grad_()
    log_share = field.responsibilities(x, times).log()[torch.arange(6), labels].sum()
    (gradient,) = torch.autograd.grad(log_share, x)
    with torch.no_grad():
        push = field.conditional(x, times, labels) - field.unconditional(x, times)
    torch.testing.assert_close(push, (1 - t) / t * gradient, **CLOSE)


def same(first: AnalyticField, second: AnalyticField) -> None:
    for t in TIMES:
        x, times, _ = points(12, t)
        labels = torch.arange(12) % (CLASSES + 1)
        torch.testing.assert_close(first(x, times, labels), second(x, times, labels), **CLOSE)
        torch.testing.assert_close(
            first.responsibilities(x, times), second.responsibilities(x, times), **CLOSE
        )


def test_the_order_of_components_changes_nothing() -> None:
    every = parts()
    same(every.field(), every.at(torch.tensor([4, 2, 5, 0, 1, 3])).field())


def test_two_halves_are_the_whole() -> None:
    every = parts()
    halves = every.at(torch.tensor([0, 1, 2, 3, 4, 5, 0]))
    halves.weights[[0, 6]] /= 2
    same(every.field(), halves.field())


def test_one_component_a_class_needs_no_owners() -> None:
    every = parts().at(torch.tensor([1, 0, 2]))
    plain = AnalyticField(*every[:3], dtype=torch.float64)
    same(plain, every.field())
    backwards = every.at(torch.tensor([2, 1, 0]))
    same(plain, backwards.field())


def test_shared_covariance_is_covariances_that_are_equal() -> None:
    every = parts()
    shared = AnalyticField(
        every.weights, every.means, every.covariances[:1], owners=OWNERS, dtype=torch.float64
    )
    same(shared, every._replace(covariances=every.covariances[:1].expand(6, -1, -1)).field())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_components_without_weight_have_no_share(dtype: torch.dtype) -> None:
    """Also where they leave one component to a class, and lie exactly at the point asked about."""
    every = parts()
    for dead in ([0], [0, 3], [4], [0, 3, 4]):
        empty = every._replace(weights=every.weights.clone())
        empty.weights[dead] = 0.0
        kept = every.at(torch.tensor([m for m in range(len(OWNERS)) if m not in dead]))
        for t in TIMES:
            times = torch.full((len(dead),), t, dtype=torch.float64)
            for label in range(CLASSES + 1):
                at = t * every.means[dead], times, torch.full((len(dead),), label)
                got = empty.field(dtype)(*at)
                assert got.isfinite().all()
                assert torch.equal(got, kept.field(dtype)(*at))


def test_a_class_without_weight_keeps_its_own_field_and_no_share() -> None:
    every = parts()
    absent = every._replace(weights=every.weights.clone())
    absent.weights[OWNERS == 1] = 0.0
    equal = every._replace(weights=torch.ones(len(OWNERS), dtype=torch.float64))
    x, times, _ = points(12, 0.7)
    labels = torch.ones(12, dtype=torch.int64)
    got, field = absent.field().conditional(x, times, labels), absent.field()
    torch.testing.assert_close(got, equal.field().conditional(x, times, labels), **CLOSE)
    assert (field.responsibilities(x, times)[:, 1] == 0).all()
    others = every.at(OWNERS != 1)
    expected = torch.stack([dense(a, 0.7, others) for a in x])
    torch.testing.assert_close(field.unconditional(x, times), expected, **CLOSE)


def large(separation: float) -> tuple[Parts, Tensor]:
    """160 components of 10 classes, covariances down to 1e-3, and codes (320, 48) of theirs."""
    source, count, dim = generator(8), 160, 48
    means = separation * torch.randn(count, dim, generator=source, dtype=torch.float64)
    spectrum = torch.logspace(-3, 0, dim, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(count, dim, dim, generator=source, dtype=torch.float64))[0]
    weights = torch.rand(count, generator=source, dtype=torch.float64)
    weights[torch.rand(count, generator=source) < 0.3] = 0.0
    owners = torch.arange(count) % 10
    every = Parts(weights, means, (basis * spectrum) @ basis.mT, owners)
    return every, torch.cat([every.draw(160, source)[0], means])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("separation", [1e-3, 1.0, 1e3, 1e6])
def test_finite_on_all_of_the_path(separation: float, dtype: torch.dtype) -> None:
    every, codes = large(separation)
    field, source = every.field(dtype), generator(9)
    labels = torch.arange(len(codes)) % 11
    for t in TIMES:
        times = torch.full((len(codes),), t, dtype=torch.float64)
        noise = torch.randn(codes.shape, generator=source, dtype=torch.float64)
        for x in (interpolate(codes, noise, times), 100 * noise, torch.zeros_like(noise)):
            velocity = field(x, times, labels)
            assert velocity.dtype == dtype
            assert velocity.isfinite().all()
            shares = field.responsibilities(x, times)
            torch.testing.assert_close(shares.sum(1), torch.ones(len(x), dtype=dtype))


def test_single_precision_is_enough_along_the_path() -> None:
    every, codes = large(1.0)
    rough, exact, source = every.field(torch.float32), every.field(), generator(9)
    labels = torch.arange(160) % 11
    for t in TIMES:
        times = torch.full((160,), t, dtype=torch.float64)
        noise = torch.randn(160, codes.shape[1], generator=source, dtype=torch.float64)
        at = interpolate(codes[:160], noise, times), times, labels
        torch.testing.assert_close(rough(*at).double(), exact(*at), rtol=1e-3, atol=1e-3)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    field = parts().field()
    x, times, _ = points(12, 0.6)
    labels = torch.arange(12) % (CLASSES + 1)
    whole = field(x, times, labels)
    monkeypatch.setattr(module, "BLOCK", 5 * len(OWNERS) * DIM)
    torch.testing.assert_close(field(x, times, labels), whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(module, "BLOCK", 1)
    torch.testing.assert_close(field(x, times, labels), whole, rtol=1e-12, atol=1e-12)


def corners() -> Parts:
    """Two classes on the plane, of three and of two cells that do not touch."""
    means = torch.tensor([[3.0, 0], [-3, 0], [0, 3], [3, 3], [-3, -3]], dtype=torch.float64)
    spread = torch.tensor([[0.2, 0.1], [0.1, 0.1]], dtype=torch.float64)
    scales = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    weights = torch.tensor([0.3, 0.15, 0.05, 0.2, 0.3], dtype=torch.float64)
    owners = torch.tensor([0, 0, 0, 1, 1])
    return Parts(weights, means, scales[:, None, None] * spread, owners)


def ends_at(codes: Tensor, some: Parts) -> None:
    """Codes (n, d) have the mixture's shares, and each cell its mean and covariance."""
    cells = torch.cdist(codes, some.means).argmin(1)
    shares = cells.bincount(minlength=len(some.weights)) / len(codes)
    expected = (some.weights / some.weights.sum()).float()
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.015)
    for m in range(len(some.weights)):
        own = codes[cells == m]
        torch.testing.assert_close(own.mean(0), some.means[m], rtol=0, atol=0.06)
        torch.testing.assert_close(own.T.cov(), some.covariances[m], rtol=0.1, atol=0.03)


def test_flow_of_the_field_ends_at_the_mixture() -> None:
    every = corners()
    field, count = every.field(torch.float32), 20_000
    for label in (0, 1, 2):
        start = torch.randn(count, 2, generator=generator(6 + label))
        labels = torch.full((count,), label)
        codes = euler(field, start, labels, null=2, steps=200).double()
        ends_at(codes, every if label == 2 else of_class(every, label))


def test_guidance_narrows_cells_and_shifts_their_shares() -> None:
    """g = 0 ends at the whole mixture; g > 1 costs spread, and shares of cells near other classes.

    It stays finite and in its own class; only g = 1 ends at the class's own mixture.
    """
    every, count = corners(), 10_000
    field, own = every.field(torch.float32), of_class(every, 0)
    start, labels = torch.randn(count, 2, generator=generator(6)), torch.zeros(count).long()
    ends_at(euler(field, start, labels, null=2, steps=200, guidance=0.0).double(), every)
    codes = euler(field, start, labels, null=2, steps=200, guidance=3.0)
    assert (field.responsibilities(codes, torch.ones(count))[:, 0] > 0.999).all()
    cells = torch.cdist(codes.double(), own.means).argmin(1)
    shares = cells.bincount(minlength=3) / count
    assert shares[0] > 0.68  # it was 0.6: this cell is the furthest from class 1
    for m in (0, 1):
        assert codes[cells == m].T.cov().trace() < 0.8 * own.covariances[m].trace()


@pytest.mark.parametrize(
    ("owners", "what"),
    [
        (torch.zeros(2, dtype=torch.int64), r"expected \(3,\)"),
        (torch.zeros(3), "int64"),
        (torch.tensor([0, 1, -1]), "from 0 up"),
        (torch.tensor([0, 2, 2]), "class 1 owns no component"),
    ],
)
def test_refuses_owners_that_do_not_fit(owners: Tensor, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        AnalyticField(torch.ones(3), torch.zeros(3, DIM), torch.eye(DIM)[None], owners=owners)
