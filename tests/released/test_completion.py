"""Coarse samples of tokens, and their completion: what is kept, what is drawn, what is refused."""

import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from token_runs import FLOW, pretrained

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.samples import SamplesWriter, read_samples, read_summary
from dpsynth.artifacts.token_file import load_tokens
from dpsynth.assess.check import ensure_checked
from dpsynth.errors import DataError, MissingError, UsageError
from dpsynth.models.wavelet.autoregressive import save_transformer
from dpsynth.private.moments import release_moments
from dpsynth.public.tokens import load_token_space
from dpsynth.released.card_contents import _how_made
from dpsynth.released.completion import complete_wavelet
from dpsynth.released.own import own_origin
from dpsynth.released.sampling import sample

CLASSES = [str(digit) for digit in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose `released/model.safetensors` is the public transformer, drawn and completed."""
    verified = pretrained(tmp_path_factory.mktemp("completion"))
    space = load_token_space(verified.run, verified.plan)
    save_transformer(
        space.transformer, verified.run.released / "model.safetensors", room="released"
    )
    sample(verified)
    complete_wavelet(verified)
    return verified


@pytest.fixture
def space(run):
    return load_token_space(run.run, run.plan)


def read(run, name):
    return read_samples(run.run.released / name, CLASSES, (8, 8, 1))


def band(images):
    """Means of 2 x 2 pixels: the LL of one Haar level in the units of the pixels."""
    n = len(images)
    return images.reshape(n, 4, 2, 4, 2).mean(axis=(2, 4))


def coarse_folder(path, images, texts=None, stamp=None):
    """An image folder as any tool may write it: no summary, no tokens."""
    (path / "images").mkdir(parents=True)
    lines = ["file_name,label,text"]
    for number, image in enumerate(images):
        Image.fromarray(image).save(path / "images" / f"{number}.png")
        text = "" if texts is None else texts[number]
        lines.append(f"images/{number}.png,{number % 10},{text}")
    (path / "metadata.csv").write_text("\n".join(lines) + "\n")
    return path


def random_images(count, side, seed=0):
    # Away from black and white, so that nothing is clipped but where details are large.
    return np.random.default_rng(seed).integers(118, 138, (count, side, side)).astype(np.uint8)


def test_coarse_samples_are_the_decoded_private_tokens(run, space):
    images, labels = read(run, "coarse")
    kept = load_tokens(run.run.released / "coarse" / "tokens.safetensors")
    assert kept.ids.shape == (20, 4)
    assert np.bincount(labels).tolist() == [2] * 10
    assert kept.tokenizer == sha256_file(run.run.public / "tokenizer.safetensors")
    assert np.array_equal(images, space.decode(torch.from_numpy(kept.ids.astype(np.int64))))
    # No detail was drawn: squares of 2 x 2 pixels are even but for rounding.
    blocks = images.reshape(20, 4, 2, 4, 2)
    assert (blocks.max(axis=(2, 4)).astype(int) - blocks.min(axis=(2, 4))).max() <= 1


def test_completed_samples_keep_the_coarse_tokens_labels_and_captions(run, space):
    coarse, labels = read(run, "coarse")
    images, found = read(run, "samples")
    assert np.array_equal(found, labels)
    lines = [
        (run.run.released / name / "metadata.csv").read_bytes() for name in ("coarse", "samples")
    ]
    assert lines[0] == lines[1]
    assert (images != coarse).any()
    # The decoder lets no detail token move the approximation, wherever no pixel is clipped.
    free = ((images > 0) & (images < 255)).reshape(20, 4, 2, 4, 2).all(axis=(2, 4))
    clear = free & ((coarse > 0) & (coarse < 255)).reshape(20, 4, 2, 4, 2).all(axis=(2, 4))
    assert clear.any()
    assert np.abs(band(images.astype(float)) - band(coarse.astype(float)))[clear].max() < 1.01


def test_the_origin_names_all_that_the_images_are_made_of(run):
    origin = read_summary(run.run.released / "samples")["origin"]
    files = {name: run.run.public / f"{name}.safetensors" for name in ("tokenizer", "transformer")}
    for name, path in files.items():
        assert origin[f"{name}_sha256"] == sha256_file(path)
    assert origin["coarse"] == read_summary(run.run.released / "coarse")["origin"]
    model = sha256_file(run.run.released / "model.safetensors")
    assert origin["coarse"]["model_sha256"] == model
    assert (origin["source"], origin["taken"]) == ("own", "tokens")
    assert own_origin(run, 20) == origin
    assert own_origin(run, 19) != origin


def test_both_sheets_are_there_and_a_second_call_changes_nothing(run):
    released = run.run.released
    assert (released / "contact-sheet.png").is_file()
    assert (released / "contact-sheet-coarse.png").is_file()
    before = {p: p.stat().st_mtime_ns for p in (released / "samples").rglob("*.png")}
    complete_wavelet(run)
    assert {p: p.stat().st_mtime_ns for p in (released / "samples").rglob("*.png")} == before


@pytest.mark.parametrize("zipped", [False, True])
def test_images_from_elsewhere_keep_their_band(run, tmp_path, zipped):
    given = random_images(6, 8)
    source = coarse_folder(tmp_path / "given", given)
    if zipped:
        with zipfile.ZipFile(tmp_path / "given.zip", "w") as archive:
            for path in sorted(source.rglob("*")):
                archive.write(path, path.relative_to(source))
        source = tmp_path / "given.zip"
    facts = complete_wavelet(run, coarse=str(source), out=str(tmp_path / "out"))
    images, labels = read_samples(tmp_path / "out", CLASSES, (8, 8, 1))
    assert facts["count"] == 6
    assert labels.tolist() == list(range(6))
    free = ((images > 0) & (images < 255)).reshape(6, 4, 2, 4, 2).all(axis=(2, 4))
    assert free.mean() > 0.5
    off = np.abs(band(images.astype(float)) - band(given[..., None].astype(float)))
    assert off[free].max() <= 0.5
    assert read_summary(tmp_path / "out")["origin"]["taken"] == "images"


def test_images_of_the_band_alone_are_completed(run, tmp_path):
    given = random_images(4, 4)
    source = coarse_folder(tmp_path / "small", given, texts=["a seven", "", "", ""])
    facts = complete_wavelet(run, 3, coarse=str(source))
    assert facts["samples"].endswith("released/samples-completed")
    images, _ = read(run, "samples-completed")
    free = ((images > 0) & (images < 255)).reshape(3, 4, 2, 4, 2).all(axis=(2, 4))
    off = np.abs(band(images.astype(float)) - given[:3])
    assert off[free].max() <= 0.5
    table = (run.run.released / "samples-completed" / "metadata.csv").read_text()
    assert "a seven" in table


def test_a_cut_completion_goes_on_where_it_ended(run, tmp_path, monkeypatch):
    monkeypatch.setattr("dpsynth.released.completion.SHARD", 4)
    added = SamplesWriter.add

    def failing(self, *given):
        if self.written >= 8:
            raise KeyboardInterrupt
        added(self, *given)

    monkeypatch.setattr(SamplesWriter, "add", failing)
    with pytest.raises(KeyboardInterrupt):
        complete_wavelet(run, out=str(tmp_path / "cut"))
    first = {p: p.read_bytes() for p in (tmp_path / "cut" / "images").iterdir()}
    assert len(first) == 8
    monkeypatch.setattr(SamplesWriter, "add", added)
    complete_wavelet(run, out=str(tmp_path / "cut"))
    assert read_samples(tmp_path / "cut", CLASSES)[0].shape == (20, 8, 8, 1)
    assert {path: path.read_bytes() for path in first} == first


def test_another_runs_coarse_samples_are_found_by_its_folder(run, tmp_path):
    facts = complete_wavelet(run, 5, coarse=str(run.run.root), out=str(tmp_path / "others"))
    assert facts["coarse"] == str(run.run.released / "coarse")


def test_tokens_that_do_not_go_by_the_metadata_are_refused(run, tmp_path):
    shutil.copytree(run.run.released / "coarse", tmp_path / "copy")
    listed = tmp_path / "copy" / "metadata.csv"
    listed.write_text("\n".join(listed.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(DataError, match=r"tokens\.safetensors"):
        complete_wavelet(run, coarse=str(tmp_path / "copy"), out=str(tmp_path / "out"))
    (tmp_path / "copy" / "tokens.safetensors").unlink()
    (tmp_path / "copy" / "images" / "0000019.png").unlink()
    complete_wavelet(run, coarse=str(tmp_path / "copy"), out=str(tmp_path / "out"))
    assert read_summary(tmp_path / "out")["origin"]["taken"] == "images"


def test_tokens_of_another_tokenizer_are_not_taken(run, tmp_path):
    images, labels = read(run, "coarse")
    writer = SamplesWriter(tmp_path / "other", CLASSES, tokenizer="0" * 64)
    writer.add(images, labels, tokens=np.zeros((20, 4), np.int32))
    writer.finish()
    complete_wavelet(run, 2, coarse=str(tmp_path / "other"), out=str(tmp_path / "out"))
    assert read_summary(tmp_path / "out")["origin"]["taken"] == "images"


def test_images_of_another_size_are_refused(run, tmp_path):
    source = coarse_folder(tmp_path / "large", random_images(2, 16))
    with pytest.raises(DataError, match=r"16x16x1; expected 8x8x1, .* or 4x4x1"):
        complete_wavelet(run, coarse=str(source), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    colour = coarse_folder(tmp_path / "colour", random_images(6, 8).reshape(2, 8, 8, 3))
    with pytest.raises(DataError, match="8x8x3; expected 8x8x1") as refused:
        complete_wavelet(run, coarse=str(colour), out=str(tmp_path / "out"))
    assert refused.value.hint == "convert them to grey"


def test_places_that_are_none_are_refused(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    room = run.run.curator / "x"
    for out in (tmp_path / "mine", room, run.run.public / "x", run.run.released / "coarse"):
        with pytest.raises(UsageError):
            complete_wavelet(run, 2, out=str(out))
    with pytest.raises(UsageError, match="curator"):
        complete_wavelet(run, 2, coarse=str(run.run.curator))
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep me"
    assert not room.exists()


def test_more_images_than_there_are_coarse_ones_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"21 .* 20") as refused:
        complete_wavelet(run, 21)
    assert refused.value.hint.endswith("-n 21")
    source = coarse_folder(tmp_path / "given", random_images(2, 8))
    with pytest.raises(UsageError, match=r"3 .* 2") as refused:
        complete_wavelet(run, 3, coarse=str(source))
    assert refused.value.hint == "-n 2"


def test_a_source_that_is_not_there_is_told_by_its_name(run, tmp_path):
    with pytest.raises(MissingError, match="nowhere is not there") as refused:
        complete_wavelet(run, coarse=str(tmp_path / "nowhere"))
    assert "image folder" in refused.value.hint


def test_a_half_written_coarse_folder_is_refused(run, tmp_path):
    copied = tmp_path / "coarse"
    writer = SamplesWriter(copied, CLASSES)
    writer.add(random_images(2, 8), np.array([0, 1]))
    with pytest.raises(MissingError, match="not drawn to the end") as refused:
        complete_wavelet(run, coarse=str(copied), out=str(tmp_path / "out"))
    assert refused.value.hint.startswith("dpsynth sample")


def test_the_untouched_prior_draws_whole_images(run):
    facts = sample(run, 4, model="prior")
    assert facts["samples"].endswith("samples-prior")
    assert read(run, "samples-prior")[0].shape == (4, 8, 8, 1)
    assert not (run.run.released / "samples-prior" / "tokens.safetensors").exists()
    assert read_summary(run.run.released / "samples-prior")["origin"]["tokens"] == 16
    with pytest.raises(UsageError, match="distilled"):
        sample(run, 4, model="distilled")


def test_raster_order_draws_whole_images_and_leaves_nothing_to_complete(tmp_path):
    verified = pretrained(tmp_path, levels=0)
    space = load_token_space(verified.run, verified.plan)
    save_transformer(
        space.transformer, verified.run.released / "model.safetensors", room="released"
    )
    facts = sample(verified, 10)
    assert facts["samples"].endswith("released/samples")
    assert not (verified.run.released / "coarse").exists()
    assert own_origin(verified, 10) == read_summary(verified.run.released / "samples")["origin"]
    with pytest.raises(UsageError, match="raster order"):
        complete_wavelet(verified)


def test_no_model_and_no_tokens_say_what_to_type(tmp_path, tiny):
    verified = pretrained(tmp_path)
    with pytest.raises(MissingError, match="model") as refused:
        sample(verified, 5)
    assert "dpsynth train" in refused.value.hint
    with pytest.raises(MissingError) as refused:
        complete_wavelet(verified)
    assert "dpsynth sample" in refused.value.hint
    with pytest.raises(UsageError, match="no spectral tokens"):
        complete_wavelet(tiny)


def test_another_kind_of_plan_is_completed_from_its_images(tmp_path):
    verified = pretrained(tmp_path, **FLOW)
    ensure_checked(verified)
    release_moments(verified)
    facts = sample(verified)
    assert facts["coarse"].endswith("released/coarse")
    complete_wavelet(verified)
    origin = read_summary(verified.run.released / "samples")["origin"]
    assert (origin["source"], origin["taken"]) == ("own", "images")
    assert read_json(verified.run.released / "samples.json")["count"] == 20
    handed = (verified.run.released / "card.md").read_text()
    assert "`samples/`: 20 images (coarse: model release, detail drawn by the public" in handed
    assert "`coarse/`: 20 images (model release)" in handed
    listed = read_json(verified.run.released / "manifest.json")["files"]
    assert {"samples/metadata.csv", "coarse/metadata.csv", "contact-sheet-coarse.png"} <= set(
        listed
    )


def test_the_card_vouches_for_no_image_from_elsewhere(run, tmp_path):
    source = coarse_folder(tmp_path / "given", random_images(2, 8))
    complete_wavelet(run, coarse=str(source), out="samples-theirs")
    origin = read_summary(run.run.released / "samples-theirs")["origin"]
    said = " ".join(_how_made(origin))
    assert origin["source"] == "given"
    assert "nothing here vouches" in said
