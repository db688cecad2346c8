"""The kept mixtures: read back to the bit, or made again; never another release's, nor a wreck."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dpsynth.artifacts.cells import NAME, ReleasedCells, load_cells, save_cells
from dpsynth.artifacts.moments import ReleasedMoments, load_moments, save_moments
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import save_tensors
from dpsynth.planning.schema import Plan
from dpsynth.planning.yaml_plan import parse_plan
from dpsynth.public.within import WITHIN, save_within
from dpsynth.released import gaussians as module
from dpsynth.released.estimate import ClassMixtures
from dpsynth.released.gaussians import load_mixture
from dpsynth.released.mixtures_file import FORMAT, MIXTURE, load_mixtures, save_mixtures

RECIPE = "a" * 64
NAMES = ("weights", "shares", "means", "covariances")
PLAN = """\
version: 1
name: kept
budget: {epsilon: 2.0, delta: 1e-5}
private:
  source: {kind: npz, path: secret.npz}
  capacity: 1000
  image: {height: 8, width: 8}
  classes: [a, b]
  held_out: {by: hash, fraction: 0.2}
public:
  - {kind: letters, count: 60}
representation: {kind: pca, code: 3}
stages:
  moments: {cells: {most: 2, lloyd: 0, template: false}}
"""


def mixtures() -> ClassMixtures:
    """Two classes of three cells in two dimensions, one cell unused."""
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(2, 3, 2, 2))
    return ClassMixtures(
        np.array([0.25, 0.75]),
        np.array([[1 / 3, 1 / 3, 1 / 3], [0.4, 0.6, 0.0]]),
        rng.normal(size=(2, 3, 2)),
        roots @ roots.swapaxes(-1, -2) + np.eye(2),
    )


def test_mixtures_round_trip(tmp_path: Path) -> None:
    path, made = tmp_path / MIXTURE, mixtures()
    assert load_mixtures(path, RECIPE) is None
    save_mixtures(path, made, RECIPE)
    found = load_mixtures(path, RECIPE)
    assert found is not None
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(made, name))
        assert getattr(found, name).dtype == np.float64
    before = path.read_bytes()
    save_mixtures(path, found, RECIPE)
    assert path.read_bytes() == before


def test_another_recipe_format_or_room_is_not_read(tmp_path: Path) -> None:
    path, made = tmp_path / MIXTURE, mixtures()
    save_mixtures(path, made, RECIPE)
    assert load_mixtures(path, "b" * 64) is None
    arrays = {name: getattr(made, name) for name in NAMES}
    good = {"format": FORMAT, "room": "released", "recipe": RECIPE}
    for other in ({"format": "dpsynth-mixture-0"}, {"room": "curator"}):
        save_tensors(path, arrays, {**good, **other})
        assert load_mixtures(path, RECIPE) is None
    save_tensors(path, arrays, {"format": FORMAT, "room": "released"})
    assert load_mixtures(path, RECIPE) is None
    for name in NAMES:
        save_tensors(path, {key: arrays[key] for key in NAMES if key != name}, good)
        assert load_mixtures(path, RECIPE) is None


def test_a_damaged_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / MIXTURE
    save_mixtures(path, mixtures(), RECIPE)
    whole = path.read_bytes()
    for data in (b"", whole[:7], whole[:40], whole[:-1], b"x" * len(whole)):
        path.write_bytes(data)
        assert load_mixtures(path, RECIPE) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weights", lambda a: np.full(3, 1 / 3)),
        ("weights", lambda a: a[:, None]),
        ("weights", lambda a: a * 2),
        ("weights", lambda a: np.array([0.0, 1.0])),
        ("weights", lambda a: np.array([-0.5, 1.5])),
        ("weights", lambda a: a * np.nan),
        ("shares", lambda a: a[:, :2]),
        ("shares", lambda a: a.T),
        ("shares", lambda a: a * 0.99),
        ("shares", lambda a: np.array([[1.0, 0.0, 0.0], [1.5, -0.5, 0.0]])),
        ("shares", lambda a: np.zeros((2, 3))),
        ("means", lambda a: a[:1]),
        ("means", lambda a: a[..., :1]),
        ("means", lambda a: a[0]),
        ("means", lambda a: a * np.inf),
        ("means", lambda a: np.zeros((2, 3, 0))),
        ("covariances", lambda a: a[..., :1]),
        ("covariances", lambda a: a[:, :, 0]),
        ("covariances", lambda a: np.where(a == a.max(), np.nan, a)),
    ],
)
def test_arrays_that_are_no_mixtures_are_not_read(tmp_path: Path, name: str, change) -> None:
    made = mixtures()
    wrong = dataclasses.replace(made, **{name: change(getattr(made, name))})
    save_mixtures(tmp_path / MIXTURE, wrong, RECIPE)
    assert load_mixtures(tmp_path / MIXTURE, RECIPE) is None


@pytest.fixture
def released(tmp_path: Path) -> tuple[RunDir, Plan]:
    """A release by hand, beside a public room of the files that the estimate reads."""
    run, plan = RunDir.create(tmp_path / "run"), parse_plan(PLAN)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(2, 2, 3))
    seconds = np.broadcast_to(100 * 0.3 * np.eye(3), (2, 2, 3, 3)).copy()
    cells = ReleasedCells(
        centres, np.ones((2, 2), dtype=bool), np.full((2, 2), 100.0), np.zeros((2, 2, 3)), seconds,
        count_std=1.0, sum_std=1.0, second_std=5.0, radius=3.0, clip=6.0,
    )  # fmt: skip
    save_cells(run.released / NAME, cells)
    whole = 2 * seconds[:, 0] + 100 * np.einsum("yki,ykj->yij", centres, centres)
    moments = ReleasedMoments(
        np.full(2, 200.0), 100 * centres.sum(1), whole, 1.0, 1.0, 5.0, 6.0, "class"
    )
    save_moments(run.released / "moments.safetensors", moments)
    save_within(run.public / WITHIN, np.eye(3), "recipe")
    run.calibration.write_text(json.dumps({}))  # names no spread: a file beside it is not read
    return run, plan


def test_the_mixture_is_kept_until_a_file_that_it_follows_from_changes(
    released: tuple[RunDir, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = released
    made, real = [], module.estimate_cells
    monkeypatch.setattr(module, "estimate_cells", lambda *a: made.append(a) or real(*a))
    first, digest = load_mixture(run, plan)
    again, same = load_mixture(run, plan)
    assert (len(made), same) == (1, digest)
    assert (again._means == first._means).all()
    assert (again._roots == first._roots).all()

    path = run.released / "moments.safetensors"
    moments = load_moments(path)
    save_moments(path, dataclasses.replace(moments, counts=moments.counts * [1.5, 1.0]))
    other, moved = load_mixture(run, plan)
    assert (len(made), moved == digest) == (2, False)
    assert (other.weights != first.weights).any()

    cells = load_cells(run.released / NAME)
    save_cells(run.released / NAME, dataclasses.replace(cells, sums=cells.sums + 1.0))
    _, third = load_mixture(run, plan)
    assert (len(made), len({digest, moved, third})) == (3, 3)

    save_within(run.public / WITHIN, 2 * np.eye(3), "recipe")
    assert load_mixture(run, plan)[1] == third
    assert len(made) == 4
    (run.released / MIXTURE).write_bytes(b"damaged")
    load_mixture(run, plan)
    load_mixture(run, plan)
    assert len(made) == 5
