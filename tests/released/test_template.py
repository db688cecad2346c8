"""Public shapes of cells from deformed decodings: what they are, and that estimates use them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.fft import idct
from scipy.ndimage import rotate

from dpsynth.artifacts.cells import NAME, ReleasedCells, save_cells
from dpsynth.artifacts.moments import ReleasedMoments, save_moments
from dpsynth.artifacts.rooms import RunDir
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.deform import ROTATION, WAYS
from dpsynth.planning.schema import Plan
from dpsynth.planning.yaml_plan import parse_plan
from dpsynth.public.geometry import PcaCodec
from dpsynth.public.pretrain import pretrain
from dpsynth.public.representation import Representation
from dpsynth.released.gaussians import load_mixture, moments_path
from dpsynth.released.template import STRENGTH, Templates

Array = NDArray[np.float64]


def smooth_space(side: int, waves: int) -> Representation:
    """Codes are the `waves` x `waves` slowest cosines of a picture: nothing is fitted."""
    lines = idct(np.eye(side), axis=0, norm="ortho").T[:waves]
    basis = np.einsum("ar,bc->abrc", lines, lines).reshape(waves**2, side * side)
    codec = PcaCodec(basis, np.zeros(side * side), (side, side, 1))
    return Representation(codec, (side, side, 1), np.zeros(waves**2), 1.0, 100.0)


SPACE = smooth_space(28, 10)


def picture(kind: str) -> Array:
    """A disc, an upright bar or a lying one in the middle of 28 by 28 pixels, in [0, 1]."""
    down, across = np.mgrid[:28, :28] - 13.5
    if kind == "disc":
        return np.clip(8.0 - np.hypot(down, across), 0.0, 1.0)
    along, beside = (down, across) if kind == "upright" else (across, down)
    return ((np.abs(along) < 9) & (np.abs(beside) < 2)).astype(float)


def codes(*pictures: Array) -> Array:
    pixels = torch.from_numpy(np.stack(pictures)[:, None])
    return SPACE.encode(as_bytes(pixels)).double().numpy()


@pytest.fixture(scope="module")
def shapes() -> dict[str, Array]:
    """For each way, the covariances (3, d, d) of an upright bar, a lying one and a disc."""
    centres = codes(*(picture(kind) for kind in ("upright", "lying", "disc")))
    found = Templates(SPACE, 3)(centres)
    assert len(found) == len(WAYS) == 9
    return dict(zip(WAYS, found, strict=True))


def sizes(covariances: Array) -> Array:
    return np.einsum("mii->m", covariances)


def test_a_covariance_for_each_way_and_centre(shapes: dict[str, Array]) -> None:
    for covariances in shapes.values():
        assert covariances.shape == (3, 100, 100)
        assert covariances.dtype == np.float64
        assert np.isfinite(covariances).all()
        np.testing.assert_allclose(covariances, covariances.transpose(0, 2, 1), atol=1e-12)
        values = np.linalg.eigvalsh(covariances)
        assert (values > -1e-9 * values.max()).all()
        assert (sizes(covariances) > 0).all()


def test_the_seed_decides(shapes: dict[str, Array]) -> None:
    centres = codes(*(picture(kind) for kind in ("upright", "lying", "disc")))
    before = centres.copy()
    for _ in range(2):
        templates = Templates(SPACE, 3)
        for _ in range(2):  # the same object asked again, too
            assert all(map(np.array_equal, templates(centres), shapes.values()))
    other = Templates(SPACE, 4)(centres)
    assert not any(map(np.array_equal, other, shapes.values()))
    assert np.array_equal(centres, before)


def test_shapes_vary_as_their_pictures_would(shapes: dict[str, Array]) -> None:
    upright, lying, disc = sizes(shapes["rotation"])
    assert min(upright, lying) > 10 * disc  # a disc looks the same however it is turned
    across, down = sizes(shapes["shift across"]), sizes(shapes["shift down"])
    assert across[0] > 3 * down[0]
    assert down[1] > 3 * across[1]
    width, height = sizes(shapes["width"]), sizes(shapes["height"])
    assert height[0] != pytest.approx(width[0], rel=0.1)
    assert width[2] == pytest.approx(height[2], rel=1.0)


def test_rotation_is_the_direction_in_which_codes_turn(shapes: dict[str, Array]) -> None:
    """Against finite differences of another library's rotation, and the range's own variance."""
    angle = 0.05  # a small turn, in radians
    turned = [
        np.clip(rotate(picture("upright"), np.degrees(way * angle), reshape=False, order=3), 0, 1)
        for way in (-1, 1)
    ]
    back, forth = codes(*turned)
    tangent = (forth - back) / (2 * angle)
    values, vectors = np.linalg.eigh(shapes["rotation"][0])
    assert abs(vectors[:, -1] @ tangent) > 0.95 * np.linalg.norm(tangent)
    # Angles are uniform in +- STRENGTH ROTATION; a dozen of them are a rough sample.
    expected = tangent @ tangent * (STRENGTH * ROTATION) ** 2 / 3
    assert expected / 2 < values[-1] < 2 * expected


def test_nothing_is_said_of_pictures_of_a_few_pixels() -> None:
    for side, ways in ((4, 0), (7, 0), (8, 9)):
        space = smooth_space(side, 3)
        found = Templates(space, 0)(np.ones((2, 9)))
        assert len(found) == ways
        assert all(shape.shape == (2, 9, 9) for shape in found)
    assert not found[WAYS.index("thickness")].any()  # at 8 pixels a stroke has no edge to move
    assert Templates(SPACE, 0)(np.empty((0, 100))) == []


# In a run


PLAN = """\
version: 1
name: shaped
budget: {epsilon: 8.0, delta: 1e-5}
private:
  source: {kind: npz, path: nowhere.npz}
  capacity: 1000
  image: {height: 28, width: 28}
  classes: [a, b]
  held_out: {by: hash, fraction: 0.2}
public:
  - {kind: letters, count: 150}
representation: {kind: pca, code: 6}
stages:
  moments: {cells: {most: 2, template: true}}
velocity: {width: 8, depth: 1}
prior: {steps: 1, batch: 8}
"""


def write_release(run: RunDir) -> None:
    """Two classes of two cells, 200 records each, with noise that leaves covariances unsure."""
    rng = np.random.default_rng(0)
    noise, dim = 100.0, 6
    centres = rng.normal(size=(2, 2, dim))
    drawn = rng.normal(size=(2, 2, dim, dim)) * noise / 2
    seconds = 200 * 0.3 * np.eye(dim) + (drawn + drawn.swapaxes(-1, -2)) / np.sqrt(2)
    zeros = np.zeros((2, 2, dim))
    cells = ReleasedCells(
        centres, np.ones((2, 2), dtype=bool), np.full((2, 2), 200.0), zeros, seconds,
        count_std=1.0, sum_std=1.0, second_std=noise, radius=3.0, clip=6.0,
    )  # fmt: skip
    save_cells(run.released / NAME, cells)
    whole = 200 * (2 * 0.3 * np.eye(dim) + np.einsum("yki,ykj->yij", centres, centres))
    moments = ReleasedMoments(
        np.full(2, 400.0), 200 * centres.sum(1), whole, 1.0, 1.0, noise, 6.0, "class"
    )
    save_moments(moments_path(run), moments)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Plan]:
    run, plan = RunDir.create(tmp_path_factory.mktemp("shaped") / "run"), parse_plan(PLAN)
    pretrain(SimpleNamespace(plan=plan, run=run))  # type: ignore[arg-type]
    write_release(run)
    return run, plan


def test_estimates_lean_on_templates_where_the_plan_says_so(
    shaped: tuple[RunDir, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = shaped
    asked, real = [], Templates.__call__

    def seen(self: Templates, centres: Array) -> list[Array]:
        found = real(self, centres)
        asked.append((centres.shape, len(found)))
        return found

    monkeypatch.setattr(Templates, "__call__", seen)
    with_shapes, _ = load_mixture(run, plan)
    assert asked == [((4, 6), 9)]
    without = parse_plan(PLAN.replace("template: true", "template: false"))
    plain, _ = load_mixture(run, without)
    assert len(asked) == 1
    assert torch.equal(with_shapes._means, plain._means)
    assert not torch.allclose(with_shapes._roots, plain._roots, rtol=0.01)
