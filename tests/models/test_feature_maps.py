"""Feature maps: norms, company, and independent answers for what they compute."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpsynth.artifacts.embedding import MapRecipe
from dpsynth.errors import UsageError
from dpsynth.models.embeddings.build import build_map, recipe_of
from dpsynth.models.embeddings.fourier import FourierMap
from dpsynth.models.embeddings.hermite import HermiteMap, rate_of
from dpsynth.models.embeddings.tangent import TangentMap
from dpsynth.models.lenet import to_tensor
from dpsynth.models.seeding import generator
from dpsynth.private.lattice import CODE_MAX, quantise_rows

SHAPE = (3, 4, 2)
SIZE = math.prod(SHAPE)
PAIRS = np.array([[0, 5], [3, 23], [7, 8]])
CENTRE = np.arange(SIZE, dtype=np.uint8).reshape(SHAPE) * 9


def hermite_map(order=20, pair_order=3, alpha=0.5, pairs=PAIRS, length=0.5):
    return HermiteMap(
        SHAPE, length=length, order=order, pairs=pairs, pair_order=pair_order, alpha=alpha
    )


MAPS = {
    "fourier": FourierMap(SHAPE, 200, 1.5, 3),
    "hermite": hermite_map(),
    "tangent": TangentMap(SHAPE, 30, CENTRE, 3),
}
EACH = pytest.mark.parametrize("kind", list(MAPS))
IMAGES = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), dtype=np.uint8)
anything = arrays(
    np.uint8, (1, *SHAPE), elements=st.one_of(st.integers(0, 255), st.sampled_from([0, 255]))
)


@EACH
@settings(max_examples=60, deadline=None)
@given(image=anything)
def test_no_image_has_a_norm_above_one(kind, image):
    space = MAPS[kind]
    found = space.encode_exact_many(image)
    assert found.shape == (1, space.dim)
    assert np.linalg.norm(found) <= 1 + 1e-12
    if kind == "fourier":
        assert math.isclose(np.linalg.norm(found), 1, rel_tol=1e-12)
    codes, finite = quantise_rows(found, space.radius)
    assert finite.all()
    assert sum(int(c) ** 2 for c in codes[0]) <= CODE_MAX**2


@EACH
@pytest.mark.parametrize("flatness", [0, 255, "centre"])
def test_flat_images_have_finite_features(kind, flatness):
    image = CENTRE[None] if flatness == "centre" else np.full((1, *SHAPE), flatness, np.uint8)
    assert np.isfinite(MAPS[kind].encode_exact_many(image)).all()


@EACH
def test_a_record_has_the_same_bits_in_any_company(kind):
    space = MAPS[kind]
    alone = np.concatenate([space.encode_exact_many(one[None]) for one in IMAGES])
    for rows in (3, 7, 40):
        for order in (np.arange(40), np.random.default_rng(rows).permutation(40)):
            parts = [
                space.encode_exact_many(IMAGES[order[at : at + rows]]) for at in range(0, 40, rows)
            ]
            assert np.concatenate(parts).tobytes() == alone[order].tobytes()


@EACH
def test_the_generators_side_is_the_same_map(kind):
    space = MAPS[kind]
    weights = torch.rand(3, len(IMAGES), generator=torch.Generator().manual_seed(0))
    exact = space.encode_exact_many(IMAGES)
    found = space.sums(to_tensor(IMAGES), weights).numpy()
    assert np.abs(found - weights.numpy() @ exact).max() < 3e-4 * len(IMAGES) ** 0.5
    squares = space.squares(to_tensor(IMAGES)).numpy()
    assert np.allclose(squares, np.square(exact).sum(1), atol=1e-5)


@EACH
def test_its_gradient_is_that_of_finite_differences(kind):
    space = MAPS[kind]
    at = torch.full((1, 2, 3, 4), 0.4) + 0.2 * torch.rand(1, 2, 3, 4)
    at.requires_grad_()
    aim = torch.randn(1, space.dim, generator=torch.Generator().manual_seed(1))
    (space.sums(at, torch.ones(1, 1)) * aim).sum().backward()
    move = torch.randn(at.shape, generator=torch.Generator().manual_seed(2))
    step = 1e-3
    with torch.no_grad():
        up, down = (
            float((space.sums(at + s * move, torch.ones(1, 1)) * aim).sum()) for s in (step, -step)
        )
    slope = float((at.grad * move).sum())
    assert abs((up - down) / (2 * step) - slope) < 0.03 * max(1.0, abs(slope))


def test_fourier_features_give_the_gaussian_kernel():
    space = FourierMap(SHAPE, 40_000, 1.5, 1)
    found = space.encode_exact_many(IMAGES)
    pixels = IMAGES.reshape(40, -1) / 255
    squared = np.square(pixels[:, None] - pixels[None]).sum(-1)
    assert np.abs(found @ found.T - np.exp(-squared / (2 * 1.5**2))).max() < 0.03


@pytest.mark.parametrize("length", [0.3, 0.6, 1.5])
def test_hermite_features_give_mehlers_kernels(length):
    space = hermite_map(order=90, pair_order=60, length=length)
    found = space.encode_exact_many(IMAGES[:8])
    pixels = IMAGES[:8].reshape(8, -1) / 255
    each = np.exp(-np.square(pixels[:, None] - pixels[None]) / (2 * length**2))
    wanted = 0.5 * each.mean(-1) + 0.5 * (each[..., PAIRS[:, 0]] * each[..., PAIRS[:, 1]]).mean(-1)
    assert np.abs(found @ found.T - wanted).max() < 2e-3


def test_hermite_features_are_those_of_numpys_polynomials():
    found = hermite_map(order=6, pairs=np.zeros((0, 2), np.int64)).encode_exact_many(IMAGES[:3])
    r = rate_of(0.5)
    pixels = IMAGES[:3].reshape(3, -1) / 255
    for c in range(7):
        value = np.polynomial.hermite.hermval(pixels, [0] * c + [1])
        norm = 2**c * math.factorial(c) * math.sqrt((1 - r) / (1 + r))
        wanted = np.sqrt((1 - r) * r**c / norm) * value * np.exp(-r / (1 + r) * pixels**2)
        assert np.allclose(found.reshape(3, SIZE, 7)[..., c], wanted / SIZE**0.5, atol=1e-12)


def test_tangent_features_are_a_networks_gradient():
    space = MAPS["tangent"]
    weights = torch.from_numpy(space._weights / 128).requires_grad_()
    signs = torch.from_numpy(space._signs).requires_grad_()
    for image in IMAGES[:6]:
        pixels = (image.astype(float).ravel() - CENTRE.astype(float).ravel()) / 255
        inputs = torch.from_numpy(np.append(pixels, 1.0))
        first, last = torch.autograd.grad(
            (signs * (weights @ inputs).relu()).sum(), [weights, signs]
        )
        wanted = torch.cat([first.flatten(), last])
        found = space.encode_exact_many(image[None])[0]
        assert np.allclose(found, (wanted / wanted.norm()).numpy(), atol=1e-5)


def test_recipes_make_the_same_map_and_no_other():
    recipe = recipe_of("fourier", SHAPE, 3, {"features": 200, "bandwidth": 1.5}, {})
    again = build_map(recipe)
    assert (again.encode_exact_many(IMAGES) == MAPS["fourier"].encode_exact_many(IMAGES)).all()
    other = MapRecipe("fourier", SHAPE, 4, recipe.dim, recipe.digest, recipe.numbers)
    with pytest.raises(UsageError, match="not the one"):
        build_map(other)
    with pytest.raises(UsageError, match="bandwidth"):
        recipe_of("fourier", SHAPE, 3, {"features": 200}, {})
    with pytest.raises(UsageError, match="not known"):
        recipe_of("wavelet", SHAPE, 3, {}, {})


def test_senseless_maps_are_refused():
    with pytest.raises(UsageError):
        FourierMap(SHAPE, 201, 1.0, 0)
    with pytest.raises(UsageError):
        FourierMap(SHAPE, 200, math.nan, 0)
    with pytest.raises(UsageError, match="not exact"):
        FourierMap(SHAPE, 200, 1e-12, 0)
    with pytest.raises(UsageError):
        hermite_map(pairs=np.array([[0, SIZE]]))
    with pytest.raises(UsageError):
        hermite_map(alpha=1.5)
    with pytest.raises(UsageError):
        TangentMap(SHAPE, 0, CENTRE, 0)
    with pytest.raises(UsageError, match="got"):
        MAPS["fourier"].encode_exact_many(IMAGES[:, :2])


@EACH
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_parts_are_the_whole_map_on_average(kind, share):
    space, draws = MAPS[kind], generator(0)
    images = to_tensor(IMAGES[:6])
    owners = torch.eye(2).repeat_interleave(3, dim=1) / 3
    aims = torch.from_numpy(space.encode_exact_many(IMAGES[6:8])).float()
    whole, squares = space.sums(images, owners), space.squares(images)
    products, norms, every = [], [], 1000 if share < 1 and kind != "tangent" else 1
    for _ in range(every):
        part = space.part(share, draws)
        sums = part.features.sums(images, owners)
        assert torch.allclose(sums, part.of(whole), atol=1e-5)
        products.append((sums * part.of(aims)).sum(1))
        norms.append(part.features.squares(images))
        assert (sums.shape[1] < 0.5 * space.dim) == (every > 1)
    for found, wanted in ((products, (whole * aims).sum(1)), (norms, squares)):
        each = torch.stack(found)
        error = 5 * each.std(0) / every**0.5 if every > 1 else torch.zeros(len(wanted))
        assert ((each.mean(0) - wanted).abs() < error + 1e-5).all()


@pytest.mark.parametrize("length", [0.05, 0.2, 0.57, 3.0])
def test_polynomials_give_the_features_that_the_recursion_gives(length):
    space = hermite_map(length=length, order=20, pair_order=3)
    images = to_tensor(IMAGES[:8])
    owners = torch.rand(3, 8, generator=generator(0))
    wanted = space.features(images)
    assert torch.allclose(space.sums(images, owners), owners @ wanted, atol=1e-5)
    assert torch.allclose(space.squares(images), wanted.square().sum(1), atol=1e-5)
