"""Caption features: what they are, their public centre and radius, and the file they lie in."""

import csv
import io
import json
import math

import numpy as np
import pytest
from encoderkit import DIM, write_encoder
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from public.public_helpers import small_plan, stand_in, write_public

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import BudgetError, DataError, MissingError, PlanError, UsageError
from dpsynth.planning.workload import feature_dim, released_dim
from dpsynth.public.captions import drawn_captions, sampling_captions
from dpsynth.public.feature_stage import MOST_PUBLIC, public_captions
from dpsynth.public.features import (
    FEATURES,
    INTERCEPT,
    CaptionFeatures,
    clipped,
    fit_features,
    load_features,
    release_of,
)
from dpsynth.public.pretrain import pretrain
from dpsynth.public.sources import PublicImages, read_public

NAMES = ["cat", "dog", "emu"]
SLOTS = {"size": ["big", "wee"], "place": ["sofa", "mat"]}
TEMPLATE = {"kind": "template", "template": "a {size} {class} on {place}", "slots": SLOTS}


def private(captions=TEMPLATE, **changes):
    return {
        "source": {"kind": "npz", "path": "/nonexistent/private.npz", "captions": "said"},
        "capacity": 100,
        "image": {"height": 8, "width": 8},
        "classes": NAMES,
        "held_out": {"by": "hash", "fraction": 0.2},
        "captions": captions,
        **changes,
    }


def plan_of(features, captions=TEMPLATE, *, sensitivity="tight", **changes):
    stage = {"covariance": "shared", "sensitivity": sensitivity, "captions": features}
    return small_plan(private=private(captions), stages={"moments": stage}, **changes)


def fitted(plan, public=(), encoder=None):
    return fit_features(plan, release_of(plan), list(public), encoder)[0]


class Fake:
    """An encoder whose embeddings are known: numbers of a text's letters."""

    dim, sha256 = 4, "f" * 64

    def embed(self, texts):
        return np.array([[text.count(c) for c in "abcd"] for text in texts], float).reshape(-1, 4)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("features", ["one-hot", "slots"])
def test_indicators_are_those_of_the_filling(features, centre, intercept):
    plan = plan_of({"features": features, "centre": centre, "intercept": intercept})
    made, template = fitted(plan), plan.private.captions
    captions, fillings = template.captions(NAMES), template.fillings(NAMES)
    # Written out: one 1 a slot at its value, or one 1 at the condition.
    raw = np.zeros((12, 12 if features == "one-hot" else 7))
    for row, filling in enumerate(fillings):
        start = 0
        for k, count in zip(filling, (2, 3, 2), strict=True):
            if features == "slots":
                raw[row, start + k] = 1
                start += count
        if features == "one-hot":
            raw[row, row] = 1
    wanted = raw - raw.mean(axis=0) if centre else raw
    norm = math.sqrt(3 if features == "slots" else 1)
    if centre:  # sum over slots of 1 - 1 / values
        norm = math.sqrt(11 / 12 if features == "one-hot" else 0.5 + 2 / 3 + 0.5)
    found = made.of(captions)
    np.testing.assert_allclose(found[:, int(intercept) :], wanted, atol=1e-12)
    assert made.clip == pytest.approx(norm, rel=1e-9) and made.clip >= norm
    assert made.radius == pytest.approx(norm * math.hypot(1, 0.5 * intercept), rel=1e-9)
    assert made.dim == feature_dim(plan) == found.shape[1] and made.intercept is intercept
    if intercept:
        assert (found[:, 0] == made.clip / 2).all()
    assert (np.linalg.norm(found, axis=1) <= made.radius).all()
    np.testing.assert_array_equal(made.of([c.upper() for c in captions]), found)


def test_a_plan_without_captions_has_its_classes_for_conditions():
    plan = plan_of({"features": "one-hot", "centre": False, "intercept": False}, None)
    assert fitted(plan).of(["emu", "cat"]).tolist() == [[0, 0, 1], [1, 0, 0]]
    cased = small_plan(private=private(None, classes=["a", "A"]), stages=plan.stages.model_dump())
    assert fitted(cased).of(["A", "a"]).tolist() == [[0, 1], [1, 0]]


def test_the_papers_release_has_no_constant():
    plan = plan_of({"features": "one-hot"}, sensitivity="paper")
    assert not fitted(plan).intercept and fitted(plan).dim == feature_dim(plan) == 12


def test_a_caption_of_no_condition_is_refused_without_a_word_of_it():
    with pytest.raises(DataError) as error:
        fitted(plan_of({"features": "slots"})).of(["a secret cat on sofa"])
    assert "secret" not in f"{error.value} {error.value.hint}"


def test_sentences_are_centred_at_their_public_mean_and_clipped_at_a_public_quantile():
    settings = {"features": "sentence", "encoder": "minilm", "width": 4, "margin": 1.5}
    plan = plan_of(settings | {"clip_quantile": 0.5})
    public = ["aa", "ab", "ab", "cc", "abcd"]
    made = fitted(plan, public, Fake())
    rows = Fake().embed(sorted(set(public)))
    norms = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    assert made.clip == pytest.approx(1.5 * np.quantile(norms, 0.5))
    np.testing.assert_allclose(made.centre, rows.mean(axis=0))
    found = made.of(["a big cat on sofa", "dddd", "aaaaaaaaaa"])
    for row, text in zip(found, ["a big cat on sofa", "dddd", "aaaaaaaaaa"], strict=True):
        e = Fake().embed([text])[0] - rows.mean(axis=0)
        e *= min(1, made.clip / np.linalg.norm(e))
        np.testing.assert_allclose(row, [made.clip / 2, *e])
    with pytest.raises(PlanError, match="width"):
        fitted(plan_of(settings | {"width": 5}), public, Fake())
    with pytest.raises(PlanError, match="one and the same"):
        fitted(plan, ["aa"], Fake())


@given(
    arrays(np.float64, (3, 2), elements=st.floats(width=32)),
    st.floats(1e-3, 1e3),
)
def test_no_row_is_longer_than_the_radius_and_none_hangs_on_another(rows, radius):
    with np.errstate(all="ignore"):
        found = clipped(rows, radius)
        for row, out in zip(rows, found, strict=True):
            np.testing.assert_array_equal(clipped(row[None], radius)[0], out)
            if np.isfinite(row).all():
                assert math.hypot(*out) <= radius
                if math.hypot(*row) <= radius * (1 - 1e-9):
                    np.testing.assert_array_equal(out, row)
            else:  # stays so: the release masks it
                assert not np.isfinite(out).all()


def images(captions):
    count = len(captions)
    blank = np.zeros((count, 8, 8, 1), np.uint8)
    return PublicImages(blank, np.zeros(count, np.int64), 1, (), tuple(captions))


def test_public_captions_are_distinct_and_an_even_choice():
    plan = plan_of({"features": "slots"})
    assert public_captions(plan, images(["b", "", "a", "b"])) == ["a", "b"]
    assert public_captions(plan, images(["", ""])) == sorted(plan.private.captions.captions(NAMES))
    many = [f"{n:06d}" for n in range(3 * MOST_PUBLIC)]
    assert public_captions(plan, images(many)) == many[::3]


def picture_folder(path, texts):
    path.mkdir()
    rows = [["file_name", "label", "text"]]
    for number, text in enumerate(texts):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8)).astype(np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.png")
        rows.append([f"{number}.png", "xy"[number % 2], text])
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    (path / "metadata.csv").write_text(out.getvalue())


def test_public_images_bring_captions_only_into_plans_with_captions(tmp_path):
    picture_folder(tmp_path / "p", ["a big emu", "", "two words"])
    bare = write_public(tmp_path / "q.npz", count=4)
    sources = [{"kind": "folder", "path": str(tmp_path / "p")}, {"kind": "npz", "path": str(bare)}]
    plain = read_public(small_plan(public=sources))
    captioned = read_public(plan_of({"features": "slots"}, public=sources))
    assert plain.captions is None
    assert captioned.captions == ("a big emu", "", "two words", "", "", "", "")
    np.testing.assert_array_equal(plain.images, captioned.images)
    assert plain.labels.tolist() == captioned.labels.tolist()
    # What is used decides the hash: captions where there are some.
    assert plain.sources[0].sha256 != captioned.sources[0].sha256
    assert plain.sources[1] == captioned.sources[1]


@pytest.fixture(scope="module")
def made_run(tmp_path_factory):
    """A pretrained run of a plan with slots."""
    root = tmp_path_factory.mktemp("slots")
    settings = {"features": "slots"}
    plan = plan_of(settings, public=[{"kind": "npz", "path": str(write_public(root / "p.npz"))}])
    verified = stand_in(plan, root / "run")
    return verified, pretrain(verified)


def test_pretrain_makes_features_that_the_calibration_names(made_run):
    verified, facts = made_run
    path = verified.run.public / FEATURES
    assert facts["features_sha256"] == sha256_file(path)
    assert (verified.run.public / "features.png").exists()
    stored, metadata = load_tensors(path)
    assert (metadata["room"], metadata["kind"]) == ("public", "slots")
    assert {name: array.shape for name, array in stored.items()} == {
        "centre": (7,),
        "radius": (1,),
        "table": (12, 7),
    }
    loaded = load_features(verified.run, verified.plan)
    again = fitted(verified.plan)
    captions = verified.plan.private.captions.captions(NAMES)
    np.testing.assert_array_equal(loaded.of(captions), again.of(captions))
    assert (loaded.clip, loaded.radius, loaded.dim) == (again.clip, again.radius, 8)
    assert released_dim(verified.plan) == 6
    assert pretrain(verified) == facts


def test_lost_features_come_back_after_a_charge_but_others_do_not(made_run):
    verified, facts = made_run
    path = verified.run.public / FEATURES
    verified.run.transcript.write_text("{}\n")
    try:
        path.unlink()
        assert pretrain(verified) == facts and sha256_file(path) == facts["features_sha256"]
        changed = plan_of({"features": "slots", "centre": False}, public=verified.plan.public)
        with pytest.raises(BudgetError):
            pretrain(stand_in(changed, verified.run.root))
    finally:
        verified.run.transcript.unlink()


def test_another_file_is_not_taken_for_the_features(made_run):
    verified, _ = made_run
    path = verified.run.public / FEATURES
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(UsageError):
            load_features(verified.run, verified.plan)
        path.unlink()
        with pytest.raises(MissingError):
            load_features(verified.run, verified.plan)
    finally:
        path.write_bytes(kept)
    with pytest.raises(UsageError):
        load_features(verified.run, plan_of({"features": "slots", "intercept": False}))


def free_plan(root, **changes):
    pytest.importorskip("transformers")
    folder = root / "encoder"
    if not folder.exists():
        write_encoder(folder)
    (root / "said.txt").write_text("a big cat\na wee dog\nan emu on a sofa\n")
    settings = {"features": "sentence", "encoder": str(folder), "width": DIM}
    return plan_of(
        settings,
        {"kind": "free"},
        velocity={"kind": "mmdit", "width": 16, "depth": 1, "heads": 2},
        sampling={"captions": str(root / "said.txt")},
        public=[{"kind": "npz", "path": str(write_public(root / "p.npz"))}],
        **changes,
    )


def test_free_captions_are_encoded_by_the_encoder_of_the_run(tmp_path):
    from dpsynth.models.sentence import load_encoder

    plan = free_plan(tmp_path)
    verified = stand_in(plan, tmp_path / "run")
    facts = pretrain(verified)
    features, encoder = load_features(verified.run, plan), load_encoder(tmp_path / "encoder")
    assert facts["features_sha256"] == sha256_file(verified.run.public / FEATURES)
    rows = encoder.embed(["a big cat", "a wee dog", "an emu on a sofa"])
    np.testing.assert_allclose(features.centre, rows.mean(axis=0))
    e = encoder.embed(["some dog"])[0] - rows.mean(axis=0)
    e *= min(1, features.clip / np.linalg.norm(e))
    np.testing.assert_allclose(features.of(["some dog"])[0], [INTERCEPT * features.clip, *e])
    assert features.dim == feature_dim(plan) and features.table.shape == (0, DIM)
    config = json.loads((tmp_path / "encoder" / "sentence_bert_config.json").read_text())
    (tmp_path / "encoder" / "sentence_bert_config.json").write_text(
        json.dumps(config | {"max_seq_length": 4})
    )
    with pytest.raises(UsageError, match="encoder is not the one"):
        load_features(verified.run, plan)


def test_of_a_template_only_the_table_is_kept_and_no_encoder_is_asked_again(tmp_path):
    free = free_plan(tmp_path)
    settings = free.stages.moments.captions.model_dump() | {"encoder": str(tmp_path / "encoder")}
    plan = plan_of(settings, public=free.public)
    verified = stand_in(plan, tmp_path / "run")
    pretrain(verified)
    captions = plan.private.captions.captions(NAMES)
    wanted = load_features(verified.run, plan).of(captions)
    for path in (tmp_path / "encoder").glob("*.safetensors"):
        path.unlink()
    np.testing.assert_array_equal(load_features(verified.run, plan).of(captions), wanted)
    assert read_json(verified.run.calibration)["features_sha256"]


def test_captions_to_draw_for(tmp_path):
    plan = plan_of({"features": "slots"})
    assert drawn_captions(plan) == plan.private.captions.captions(NAMES)
    path = tmp_path / "said.txt"
    path.write_bytes("\ufeffa big cat\r\n  an   emu \n".encode())
    assert sampling_captions(plan, path) == ["a big cat", "an emu"]
    for content in (b"", b"a\n\nb\n", b"a\nb\na\n", b"\xff\xfe", b"x\n" * 5000, b"x" * 2000):
        path.write_bytes(content)
        with pytest.raises(DataError):
            sampling_captions(plan, path)
    numbered = "\n".join(map(str, range(4096)))
    path.write_text(numbered)
    with pytest.raises(DataError, match="4096 captions"):
        sampling_captions(plan, path)
    with pytest.raises(MissingError):
        sampling_captions(plan, tmp_path / "none.txt")


@pytest.mark.parametrize("way", ["itself", "inside", "symlink", "hard link", "folder by a link"])
def test_private_captions_are_never_drawn_for(tmp_path, way):
    secret = tmp_path / "secret"
    secret.mkdir()
    inside = secret / "captions.txt"
    inside.write_text("a private word\n")
    source = {"kind": "folder", "path": str(secret)}
    path = inside
    if way in ("itself", "hard link"):
        source = {"kind": "npz", "path": str(inside), "captions": "said"}
    if way == "symlink":
        path = tmp_path / "public.txt"
        path.symlink_to(inside)
    if way == "hard link":
        path = tmp_path / "public.txt"
        path.hardlink_to(inside)
    if way == "folder by a link":
        (tmp_path / "public").symlink_to(secret)
        path = tmp_path / "public" / "captions.txt"
    plan = small_plan(private=private(source=source))
    with pytest.raises(PlanError, match="private source") as error:
        sampling_captions(plan, path)
    assert "private word" not in str(error.value)
    other = tmp_path / "other.txt"
    other.write_text("a public word\n")
    assert sampling_captions(plan, other) == ["a public word"]


def test_features_are_plain_values():
    made = CaptionFeatures("one-hot", np.zeros(2), 1.0, True, np.eye(2), {"a": 0, "b": 1})
    assert made.of([]).shape == (0, 3)
