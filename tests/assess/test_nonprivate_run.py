"""Reference runs in the curator's room: nothing else changes, and nothing released takes them."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import token_runs
import torch
from clikit import DIGITS
from PIL import Image

from dpsynth.artifacts.nonprivate import KEY, TEXTS, is_stamped
from dpsynth.artifacts.samples import read_samples
from dpsynth.artifacts.tensors import load_released, load_tensors
from dpsynth.assess.check import ensure_checked
from dpsynth.assess.nonprivate import exact, flows, making, tokens
from dpsynth.assess.nonprivate.making import reference
from dpsynth.assess.nonprivate.room import Place
from dpsynth.errors import DataError, UsageError
from dpsynth.models.velocity import load_for
from dpsynth.models.wavelet.autoregressive import load_transformer
from dpsynth.planning.verify import VerifiedPlan, make_run
from dpsynth.private.dpsgd import train
from dpsynth.private.moments import release_moments
from dpsynth.public.pretrain import pretrain
from dpsynth.public.projection import load_release_space
from dpsynth.released.distill import distill
from dpsynth.released.sampling import sample
from dpsynth.vault import open_private

FEW = DIGITS.replace("fraction: 0.2", "fraction: 0.8")
CLASSES = [str(digit) for digit in range(10)]
PLAN = f"""\
version: 1
name: ceiling
budget: {{epsilon: 8.0, delta: 1e-5}}
{FEW}
public: [{{kind: letters, count: 100}}]
representation: {{kind: pca, code: 6}}
stages: STAGES
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3, batch: 32}}
MORE
"""
TRAINED = "{moments: {}, train: {rate: 0.05, steps: 4, chunk: 2, multiplicity: 2, buckets: 2}}"
FLOW = "distillation: {steps: 3, batch: 32}\nsampling: {method: flow, count: 20, steps: 2}"


def _planned(folder: Path, stages: str, more: str) -> VerifiedPlan:
    folder.mkdir(exist_ok=True)
    (folder / "plan.yaml").write_text(PLAN.replace("STAGES", stages).replace("MORE", more))
    verified = make_run(folder / "plan.yaml", folder / "run")
    pretrain(verified)
    return verified


def _outside(root: Path) -> dict[str, str]:
    """Hashes of all files of a working folder but those of the curator's room."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "curator" not in path.parts
    }


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """References before and after a run's private stages, and what lay outside its room."""
    root = tmp_path_factory.mktemp("references")
    verified = _planned(root, TRAINED, FLOW)
    early_before = _outside(root)
    early = reference(verified, count=10)
    early_after, first = _outside(root), Place(verified.run, "nonprivate").model.read_bytes()
    ensure_checked(verified)
    release_moments(verified)
    distill(verified)
    train(verified)
    sample(verified)
    before = _outside(root)
    for kind in ("nonprivate", "pretrained"):
        reference(verified, kind, 20)
    return {
        "verified": verified,
        "early": (early_before, early_after, early, first),
        "late": (before, _outside(root)),
    }


def test_nothing_outside_the_curators_room_changes(story) -> None:
    early_before, early_after, _, _ = story["early"]
    assert early_after == early_before
    before, after = story["late"]
    assert after == before
    assert {"run/transcript.jsonl", "run/released/manifest.json"} <= set(after)


def test_it_says_where_things_lie_and_no_more(story) -> None:
    run, told = story["verified"].run, story["early"][2]
    assert told == {
        "reference": "nonprivate",
        "count": 10,
        "where": str(run.curator / "reference-nonprivate"),
        "contact_sheet": str(run.curator / "reference-nonprivate.png"),
    }


def test_after_distillation_it_starts_from_what_was_distilled(story) -> None:
    """Before, from the prior: the model of then is not the one of now."""
    assert Place(story["verified"].run, "nonprivate").model.read_bytes() != story["early"][3]


@pytest.mark.parametrize("kind", ["nonprivate", "pretrained"])
def test_every_image_and_every_table_is_stamped(story, kind) -> None:
    place = Place(story["verified"].run, kind)
    pictures = [*sorted((place.folder / "images").iterdir()), place.sheet]
    assert len(pictures) == 21
    for path in pictures:
        assert Image.open(path).text[KEY] == TEXTS[kind]
    header, *rows = place.folder.joinpath("metadata.csv").read_text().splitlines()
    assert header == "file_name,label,text,stamp"
    assert len(rows) == 20
    assert all("NON-PRIVATE" in row for row in rows)
    summary = json.loads(place.folder.with_name(f"reference-{kind}.json").read_text())
    assert (summary["room"], summary["stamp"][KEY]) == ("curator", TEXTS[kind])
    assert is_stamped(place.folder)
    assert not is_stamped(place.run.released / "samples")


def test_a_stamp_outlives_its_table_and_a_zip(story, tmp_path) -> None:
    folder = Place(story["verified"].run, "nonprivate").folder
    assert is_stamped(Path(shutil.make_archive(str(tmp_path / "packed"), "zip", folder)))
    shutil.copytree(folder / "images", tmp_path / "bare")
    assert is_stamped(tmp_path / "bare")
    assert not is_stamped(tmp_path / "packed.zip.nowhere")


def test_only_the_owner_may_read(story) -> None:
    for path in story["verified"].run.curator.glob("reference-*"):
        for one in (path, *path.rglob("*")):
            assert one.stat().st_mode & 0o077 == 0, one


def test_no_released_loader_takes_the_model(story) -> None:
    verified = story["verified"]
    path = Place(verified.run, "nonprivate").model
    assert load_tensors(path)[1]["room"] == "curator"
    with pytest.raises(UsageError, match="curator"):
        load_released(path)
    with pytest.raises(UsageError, match="expects"):
        load_for(path, verified.plan)
    own = verified.run.released / "model.safetensors"
    kept = own.read_bytes()
    own.write_bytes(path.read_bytes())
    try:
        with pytest.raises(UsageError, match="expects"):
            sample(verified, 7)
    finally:
        own.write_bytes(kept)


def test_no_released_loader_takes_the_images(story) -> None:
    with pytest.raises(DataError, match="stamp"):
        read_samples(Place(story["verified"].run, "nonprivate").folder, CLASSES)


def test_the_model_is_kept_for_another_count_and_images_for_the_same(story, monkeypatch) -> None:
    verified = story["verified"]
    monkeypatch.setattr(flows, "trained", None)  # any training would fail
    again = reference(verified, count=12)
    assert len(list(Path(again["where"], "images").iterdir())) == 12
    monkeypatch.setattr(making, "_write", None)  # any drawing too
    assert reference(verified, count=12) == again


def test_an_interrupted_drawing_goes_on(story, monkeypatch) -> None:
    verified, calls = story["verified"], []

    def cut(*_: object) -> object:
        def pictures(labels: object, source: object) -> np.ndarray:
            calls.append(len(labels))
            if len(calls) == 2:
                raise KeyboardInterrupt
            return np.full((len(labels), 8, 8, 1), len(calls), np.uint8)

        return pictures

    monkeypatch.setattr(making, "SHARD", 4)
    monkeypatch.setattr(making, "_pictures", cut)
    folder = Place(verified.run, "pretrained").folder
    with pytest.raises(KeyboardInterrupt):
        reference(verified, "pretrained", 10)
    assert len(list((folder / "images").iterdir())) == 20  # the earlier one is whole until then
    reference(verified, "pretrained", 10)
    assert calls == [4, 4, 4, 2]
    greys = [int(np.asarray(Image.open(p)).max()) for p in sorted((folder / "images").iterdir())]
    assert greys == [1] * 4 + [3] * 4 + [4] * 2


def test_what_is_refused(story) -> None:
    with pytest.raises(UsageError, match="no reference"):
        reference(story["verified"], "private")
    with pytest.raises(UsageError, match="at least 1"):
        reference(story["verified"], count=0)


def test_exact_moments_are_those_of_the_clipped_codes(tmp_path) -> None:
    """By NumPy: counts, sums and second moments of codes cut to the ball, class by class."""
    stages = "{moments: {cells: {most: 2, lloyd: 1}}}"
    verified = _planned(tmp_path, stages, "sampling: {count: 20}")
    space = load_release_space(verified.run, verified.plan).representation
    images, labels = open_private(verified).train.arrays()
    codes = space.encode_exact_many(images)
    codes *= np.minimum(1.0, space.radius / np.linalg.norm(codes, axis=1))[:, None]
    found = exact._rounds(verified)
    assert found.moments.counts.tolist() == np.bincount(labels, minlength=10).tolist()
    assert (found.moments.count_std, found.cells.second_std) == (0.0, 0.0)
    means = np.array([codes[labels == y].mean(0) for y in range(10)])
    seconds = np.array([codes[labels == y].T @ codes[labels == y] for y in range(10)])
    ours = found.moments.sums / found.moments.counts[:, None]
    assert ours == pytest.approx(means, abs=1e-3)
    assert found.moments.seconds == pytest.approx(seconds, abs=0.05)
    assert found.cells.counts.sum(axis=1) == pytest.approx(found.moments.counts)
    drawn = exact.exact_mixture(verified).class_means.numpy()
    assert drawn == pytest.approx(means, abs=0.05)  # what cells too small to be known leave out


def test_tokens_trained_without_noise_are_completed_and_refused_as_released(tmp_path) -> None:
    verified = token_runs.pretrained(tmp_path, private=FEW)
    told = reference(verified, count=10)
    place = Place(verified.run, "nonprivate")
    assert np.asarray(Image.open(place.folder / "images/0000000.png")).shape == (8, 8)
    assert told["where"] == str(place.folder)
    with pytest.raises(UsageError, match="format"):
        load_transformer(place.model)
    before = load_tensors(verified.run.public / "transformer.safetensors")[0]
    after = load_tensors(place.model)[0]
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("coarse.") for name in moved)
    assert not list(verified.run.released.iterdir())


def test_coarse_images_of_another_kind_are_completed_with_their_band_kept(tmp_path) -> None:
    """Haar's LL of a completed image is that of the coarse one, but for rounding to bytes."""
    verified = token_runs.pretrained(tmp_path, private=FEW, **token_runs.FLOW)
    small = np.random.default_rng(0).integers(60, 190, (10, 4, 4, 1), dtype=np.uint8)
    coarse = small.repeat(2, axis=1).repeat(2, axis=2)
    asked = making.asked_of(verified.plan)
    pictures = tokens.with_detail(verified, asked, lambda labels, source: coarse[: len(labels)])
    full = pictures(torch.arange(10), making.fresh_generator())
    assert full.shape == (10, 8, 8, 1)
    inside = ((full > 0) & (full < 255)).all(axis=(1, 2, 3))
    means = full.reshape(10, 4, 2, 4, 2, 1).mean(axis=(2, 4))
    assert np.abs(means - small)[inside].max(initial=0) <= 0.5
    assert not np.array_equal(full, coarse)
