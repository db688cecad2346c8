"""`benchmarks.recipe` on a tiny public set: what it holds out, what it scores, what it refuses."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dpsynth.errors import UsageError
from dpsynth.planning.schema import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it is no part of the package

from benchmarks import recipe
from dpsynth.public.sources import PublicImages, SourceFacts


def plan(folder):
    draw = np.random.default_rng(0)
    clothes = draw.integers(0, 256, (150, 8, 8), dtype=np.uint8)
    np.savez(folder / "clothes.npz", images=clothes, labels=np.arange(150) % 3)
    return Plan.model_validate(
        {
            "name": "tiny",
            "budget": {"epsilon": 1.0, "delta": 1e-5},
            "private": {
                "source": {"kind": "npz", "path": "/nonexistent/private.npz"},
                "capacity": 100,
                "image": {"height": 8, "width": 8},
                "classes": ["a", "b"],
                "held_out": {"by": "hash", "fraction": 0.2},
            },
            "public": [
                {"kind": "npz", "path": str(folder / "clothes.npz")},
                {"kind": "glyphs", "count": 900},
                {"kind": "letters", "count": 30},
            ],
            "representation": {
                "kind": "autoencoder",
                "code": 6,
                "autoencoder": {"width": 4, "batch": 32},
            },
            "stages": {"moments": {}},
        }
    )


def test_a_tiny_run_scores_every_candidate(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "training_steps", lambda count, epochs: 60)
    changes = ["", "norm=true,hidden=16,loss=squares,deform=0.6,learning_rate=1e-2", "sources=3"]
    found = recipe.measure(plan(tmp_path), changes, steps=25, seeds=2, most=120)
    names = ["as planned", changes[1]]  # the third source is left out with the held-out letters
    assert [row["recipe"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert 0.0 < row["error"] < 1.0
        assert row["distance"] > 0.0
        assert row["steps"] == 25
        assert row["error_std"] >= 0.0
    assert found["rows"][0]["error"] != found["rows"][1]["error"]
    assert found["ceiling"]["error"] == 0.0
    assert found["ceiling"]["distance"] < found["floor"]["distance"]
    recipe.print_report(found, False)
    assert "floor" in capsys.readouterr().out


def public_images():
    """Two sources, four classes each, the second of letters; a third one of letters."""
    labels = np.concatenate([np.arange(40) % 4, 4 + np.arange(40) % 4, 8 + np.arange(8) % 4])
    images = np.arange(88, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 1), np.uint8)
    facts = [SourceFacts(k, n, 4, "-") for k, n in (("npz", 40), ("glyphs", 40), ("letters", 8))]
    return PublicImages(images, labels, 12, tuple(facts))


def test_held_out_letters_are_in_no_training_image():
    public = public_images()
    taught, held, _ = recipe.divided(public, None)
    assert set(public.labels[held].tolist()) == {5, 7}
    assert set(public.labels[taught].tolist()) == {0, 1, 2, 3, 4, 6}
    kept = recipe.subset(public, taught)
    assert [one.count for one in kept.sources] == [40, 20]
    assert int(kept.drawn.sum()) == 20
    taught, held, why = recipe.divided(public, 1)
    assert held.tolist() == (public.source == 0).tolist() == (~taught).tolist()
    assert "npz" in why
    with pytest.raises(UsageError, match="3 public sources"):
        recipe.divided(public, 4)


def test_parts_do_not_overlap(monkeypatch):
    trained = []

    def probe(images, labels, classes, **_):
        trained.append((images, labels, classes))

    monkeypatch.setattr(recipe, "train_probe", probe)
    found = recipe.held_out(public_images(), np.arange(40, 80), 10, 0)
    parts = [part[:, 0, 0, 0].tolist() for part in (found.rebuilt, found.reference, trained[0][0])]
    assert len({*parts[0], *parts[1], *parts[2]}) == 30
    assert set(trained[0][1].tolist()) <= set(range(trained[0][2]))


def test_default_candidates_are_all_of_them_recipes(tmp_path):
    own = plan(tmp_path)
    changes = recipe.default_changes(own)
    found = recipe.candidates(own, changes, 3)
    assert len({(one.settings.model_dump_json(), one.sources) for one in found}) == len(changes)


@pytest.mark.parametrize("text", ["colour=1", "code", "code=0", "sources=4", "norm=maybe"])
def test_what_no_recipe_has_is_refused(text, tmp_path):
    with pytest.raises(UsageError, match="--try"):
        recipe.candidates(plan(tmp_path), [text], 3)


def test_seconds_become_steps(tmp_path, monkeypatch):
    own = plan(tmp_path)
    (candidate,) = recipe.candidates(own, [""], 3)
    times = iter(range(1000))
    monkeypatch.setattr(recipe.time, "perf_counter", lambda: next(times))  # a second a step
    assert recipe.affordable(candidate, public_images(), 12.5) == 12
