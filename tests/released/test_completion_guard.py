"""What `complete-wavelet` is given by strangers, and where it must not write."""

import json
import os

import numpy as np
import pytest
from clikit import DIGITS
from PIL import Image
from token_runs import planned, pretrained

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.nonprivate import KEY, TEXTS
from dpsynth.artifacts.samples import SamplesWriter, content_digest
from dpsynth.artifacts.tensors import save_tensors
from dpsynth.errors import DataError, UsageError
from dpsynth.models.wavelet.autoregressive import save_transformer
from dpsynth.planning.verify import load_verified
from dpsynth.public.tokens import load_token_space
from dpsynth.released.coarse_source import require_open
from dpsynth.released.completion import complete_wavelet
from dpsynth.released.sampling import sample

CLASSES = ["a", "b"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    verified = pretrained(tmp_path_factory.mktemp("guard"))
    space = load_token_space(verified.run, verified.plan)
    model = verified.run.released / "model.safetensors"
    save_transformer(space.transformer, model, room="released")
    sample(verified, 10)
    complete_wavelet(verified)
    return verified


def grey(count=2):
    return np.full((count, 8, 8, 1), 128, np.uint8)


def drawn(folder, stamp=None, origin=None):
    """A folder as a sampler of anybody's writes it."""
    writer = SamplesWriter(folder, CLASSES, origin=origin or {"model": "theirs"}, stamp=stamp)
    writer.add(grey(), np.array([0, 1]))
    writer.finish()
    return folder


def tokens(folder, run, ids, **changes):
    facts = {
        "tokenizer_sha256": sha256_file(run.run.public / "tokenizer.safetensors"),
        "metadata_sha256": sha256_file(folder / "metadata.csv"),
        "format": "dpsynth-tokens-1",
        "room": "released",
    } | changes
    save_tensors(folder / "tokens.safetensors", {"ids": ids}, facts)


def complete(run, source, out):
    return complete_wavelet(run, coarse=str(source), out=str(out))


@pytest.mark.parametrize(
    "ids",
    [
        np.full((2, 4), 16, np.int32),
        np.full((2, 4), -1, np.int32),
        np.zeros((2, 3), np.int32),
        np.zeros((2, 0), np.int32),
        np.zeros((3, 4), np.int32),
        np.zeros(4, np.int32),
        np.zeros((2, 4), np.int64),
        np.full((2, 4), np.nan, np.float32),
    ],
)
def test_tokens_that_mean_nothing_are_refused(run, tmp_path, ids):
    source = drawn(tmp_path / "s")
    tokens(source, run, ids)
    with pytest.raises((DataError, UsageError)):
        complete(run, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_opens_nothing_outside_its_folder(run, tmp_path):
    """Neither to hash nor to decode: `secret.png` is a named pipe, which would never end."""
    source = drawn(tmp_path / "s")
    os.mkfifo(tmp_path / "secret.png")
    for name in ("../secret.png", str(tmp_path / "secret.png"), "images/\0.png"):
        (source / "metadata.csv").write_text(f'file_name,label,text\n"{name}",a,x\n')
        with pytest.raises(DataError, match="outside"):
            content_digest(source)
        tokens(source, run, np.zeros((1, 4), np.int32))
        (tmp_path / "s.json").unlink(missing_ok=True)
        with pytest.raises(DataError):
            complete(run, source, tmp_path / "out")


def test_a_table_or_tokens_behind_a_link_are_not_read(run, tmp_path):
    for name in ("metadata.csv", "tokens.safetensors"):
        source = drawn(tmp_path / name)
        tokens(source, run, np.zeros((2, 4), np.int32))
        (source / name).rename(tmp_path / f"real-{name}")
        (source / name).symlink_to(tmp_path / f"real-{name}")
        with pytest.raises(DataError, match="symlink"):
            complete(run, source, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [("origin", "x"), ("stamp", ["x"]), ("stamp", {"dpsynth-unsafe": 7})],
)
def test_a_summary_of_another_shape_is_refused(run, tmp_path, key, value):
    source = drawn(tmp_path / "s")
    path = tmp_path / "s.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DataError, match=r"no (sampler|origin)"):
        complete(run, source, tmp_path / "out")


def test_a_curators_stamp_in_the_summary_alone_is_enough(run, tmp_path):
    source = drawn(tmp_path / "s")
    path = tmp_path / "s.json"
    for stamp in ({KEY: "x"}, {"dpsynth": "curator-only"}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"stamp": stamp}))
        with pytest.raises(UsageError, match="curator-only"):
            complete(run, source, tmp_path / "out")


def test_one_image_of_a_reference_among_others_is_enough(run, tmp_path):
    source = drawn(tmp_path / "s")
    info = drawn(tmp_path / "r", stamp={KEY: TEXTS["nonprivate"]}) / "images" / "0000001.png"
    (source / "images" / "0000001.png").write_bytes(info.read_bytes())
    with pytest.raises(UsageError, match="curator-only"):
        complete(run, source, tmp_path / "out")


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "one\ntwo", "x" * 1001])
def test_names_and_captions_that_no_reader_lets_pass_are_refused(run, tmp_path, text):
    source = drawn(tmp_path / "s")
    rows = f'file_name,label,text\nimages/0000000.png,a,"{text}"\n'
    (source / "metadata.csv").write_text(rows, newline="")
    tokens(source, run, np.zeros((1, 4), np.int32))
    (tmp_path / "s.json").unlink()
    with pytest.raises(DataError, match="control characters"):
        complete(run, source, tmp_path / "out")


def test_many_classes_of_long_names_make_a_small_sheet(run, tmp_path):
    names = [f"{number} {'w' * 900}" for number in range(60)]
    writer = SamplesWriter(tmp_path / "s", names, origin={"model": "theirs"})
    writer.add(grey(60), np.arange(60))
    writer.finish()
    complete(run, tmp_path / "s", tmp_path / "out")
    assert max(Image.open(tmp_path / "out.png").size) < 2500
    # Classes are sorted by name, and the first images may be of the last ones.
    for number in range(30):
        path = tmp_path / "sorted" / f"{number:02}" / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(grey()[0, ..., 0]).save(path)
    listed = "".join(f"{number:02}/0.png,{number:02}\n" for number in range(29, -1, -1))
    (tmp_path / "sorted" / "metadata.csv").write_text("file_name,label\n" + listed)
    complete_wavelet(run, 2, coarse=str(tmp_path / "sorted"), out=str(tmp_path / "two"))
    assert Image.open(tmp_path / "two.png").size[1] < 300


def test_stamps_tell_images_from_elsewhere_and_carry_warnings_over(run, tmp_path):
    source = drawn(tmp_path / "s", {"dpsynth-unsafe": "UNSAFE: theirs", "other": "IDAT", "x": "y"})
    complete(run, source, tmp_path / "out")
    fields = Image.open(tmp_path / "out" / "images" / "0000000.png").text
    assert set(fields) == {"dpsynth", "dpsynth-unsafe", "dpsynth-coarse", "dpsynth-demo"}
    assert fields["dpsynth-unsafe"] == "UNSAFE: theirs"
    assert "no run vouches" in Image.open(tmp_path / "out.png").text["dpsynth-coarse"]
    own = Image.open(run.run.released / "samples" / "images" / "0000000.png").text
    assert "dpsynth-coarse" not in own


@pytest.mark.parametrize("name", ["samples", "samples-prior", "samples-plain"])
def test_images_from_elsewhere_never_take_the_place_of_the_plans_own(run, tmp_path, name):
    before = (run.run.released / "samples.json").read_bytes()
    for out in (name, run.run.released / name):
        with pytest.raises(UsageError, match="of the plan's own"):
            complete(run, drawn(tmp_path / "s"), out)
    assert (run.run.released / "samples.json").read_bytes() == before


def test_coarse_samples_that_no_sampler_tells_of_are_given_ones(run, tmp_path):
    summary = run.run.released / "coarse.json"
    kept = summary.read_bytes()
    summary.unlink()
    try:
        assert complete_wavelet(run)["samples"].endswith("samples-completed")
    finally:
        summary.write_bytes(kept)


def test_no_other_run_and_no_hand_out_is_written_to(run, tmp_path):
    other = tmp_path / "other"
    (other / "released").mkdir(parents=True)
    (other / "plan.lock.json").write_text("{}")
    (tmp_path / "handed").mkdir()
    (tmp_path / "handed" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(other / "released")
    source = drawn(tmp_path / "s")
    places = ["other/released/samples-x", "other/x", "handed/x", "link/x", "x/../other/x", "s/x"]
    for place in places:
        with pytest.raises(UsageError, match="--out"):
            complete(run, source, tmp_path / place)
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == ["0000000.png", "0000001.png"]


@pytest.mark.parametrize("name", ["out.png", "out.json"])
def test_a_file_beside_the_new_folder_stays_as_it_is(run, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="already"):
        complete(run, drawn(tmp_path / "s"), tmp_path / "out")
    assert (tmp_path / name).read_text() == "mine"


def test_records_that_moved_are_private_where_the_plan_says_and_where_they_are(tmp_path):
    """Names alone are looked at: nothing is trained, and nothing lies there."""
    old, new = tmp_path / "old", tmp_path / "new"
    private = DIGITS.replace("kind: digits", f"kind: folder, path: {old}")
    planned(tmp_path / "plan", private=private)
    verified = load_verified(tmp_path / "plan" / "run", new)
    for place in (old, new / "deep", tmp_path):
        with pytest.raises(UsageError, match="private source"):
            require_open(verified, place)
    require_open(verified, tmp_path / "other")
