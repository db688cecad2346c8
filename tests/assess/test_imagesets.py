"""Image sets of every kind are read alike; what does not fit is said without a private word."""

import gzip
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from dpsynth.artifacts.samples import write_samples
from dpsynth.assess import imagesets as module
from dpsynth.assess.imagesets import ImageSet, halves, read_set, shared
from dpsynth.errors import DataError, MissingError, UsageError
from dpsynth.planning.schema import ImageShape
from dpsynth.readers.picture import brought_to

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 9, 7, 1), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 9, 7, 3), dtype=np.uint8)
LABELS = np.array([1, 0, 1, 10, 0, 10])


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()


def idx(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def by_class(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        (folder / str(label) / f"{number}.png").write_bytes(png(image))
    return folder


def flat(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir()
    for number, image in enumerate(images):
        (folder / f"{number}.png").write_bytes(png(image))
    return folder


def zipped(folder: Path, inside: str = "") -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, f"{inside}{file.relative_to(folder)}")
    return path


def pairs(found) -> set[tuple[bytes, str]]:
    """Each image with the name of its class, whatever the order."""
    names = [found.classes[label] if label >= 0 else "" for label in found.labels]
    return {(image.tobytes(), name) for image, name in zip(found.images, names, strict=True)}


@pytest.mark.parametrize("images", [GREY, COLOUR], ids=["grey", "colour"])
def test_every_kind_gives_the_same_labelled_set(tmp_path: Path, images: np.ndarray) -> None:
    classes = ["0", "1", "10"]
    places = np.searchsorted([0, 1, 10], LABELS)
    write_samples(tmp_path / "samples", images, places, classes)
    folder = by_class(tmp_path / "classes", images, LABELS)
    np.savez(tmp_path / "ours.npz", images=images, labels=LABELS)
    np.savez(tmp_path / "others.npz", images, LABELS)
    np.savez_compressed(tmp_path / "floats.npz", images=images / 255, labels=LABELS)
    (tmp_path / "x-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "x-labels-idx1-ubyte").write_bytes(idx(LABELS))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "b.gz").write_bytes(gzip.compress(idx(LABELS)))
    given = [
        tmp_path / "samples", folder, zipped(folder), zipped(tmp_path / "samples", "wrapped/"),
        tmp_path / "ours.npz", tmp_path / "others.npz", tmp_path / "floats.npz",
        tmp_path / "x-images-idx3-ubyte", f"{tmp_path}/a.gz,{tmp_path}/b.gz",
    ]  # fmt: skip
    expected = {(i.tobytes(), str(n)) for i, n in zip(images, LABELS, strict=True)}
    for one in given:
        found = read_set(one, "--samples")
        assert found.labelled and found.classes == ("0", "1", "10"), one
        assert pairs(found) == expected and found.resized == 0, one
        assert found.images.dtype == np.uint8 and found.labels.dtype == np.int64


def test_sets_without_labels(tmp_path: Path) -> None:
    folder = flat(tmp_path / "flat", GREY)
    np.savez(tmp_path / "alone.npz", images=GREY[..., 0])
    np.savez(tmp_path / "floats.npz", GREY / 255)
    (tmp_path / "t.idx").write_bytes(idx(GREY[..., 0]))
    wrapped = zipped(folder, "one-folder/")
    for one in (folder, wrapped, tmp_path / "alone.npz", tmp_path / "floats.npz",
                tmp_path / "t.idx"):  # fmt: skip
        found = read_set(one, "--samples")
        assert not found.labelled and (found.labels == -1).all(), one
        assert pairs(found) == {(image.tobytes(), "") for image in GREY}, one


def test_captions_are_kept_and_are_no_labels(tmp_path: Path) -> None:
    folder = flat(tmp_path / "captioned", GREY[:2])
    (folder / "metadata.csv").write_text("file_name,text\n0.png,a big cat\n1.png,a dog\n")
    found = read_set(folder, "--samples")
    assert not found.labelled and found.texts == ("a big cat", "a dog")


def test_other_sizes_are_brought_to_the_reference_by_one_protocol(tmp_path: Path) -> None:
    big = RNG.integers(0, 256, (5, 18, 14, 3), dtype=np.uint8)
    shape = ImageShape(height=9, width=7, channels=1)
    found = read_set(flat(tmp_path / "big", big), "--samples", shape=shape)
    assert found.images.shape == (5, 9, 7, 1) and found.resized == 5
    grey = Image.fromarray(big[0]).convert("L").resize((7, 9), Image.Resampling.LANCZOS)
    assert (np.asarray(grey) == brought_to(big[0], shape)[..., 0]).all()
    np.savez(tmp_path / "big.npz", images=big)
    assert read_set(tmp_path / "big.npz", "--samples", shape=shape).resized == 5
    assert (read_set(tmp_path / "big.npz", "--samples", shape=shape).images == found.images).all()
    assert brought_to(GREY[0], ImageShape(height=9, width=7, channels=3)).shape == (9, 7, 3)


def refusal(kind: type[Exception], given: Path | str, **options) -> str:
    with pytest.raises(kind) as caught:
        read_set(given, "--reference", **options)
    said = f"{caught.value.message} {caught.value.hint}"
    assert "--reference" in said or "IDX" in said
    return said


def test_refusals_name_the_option_and_no_private_word(tmp_path: Path) -> None:
    refusal(MissingError, tmp_path / "secret-absent")
    (tmp_path / "secret.txt").write_text("words")
    assert "secret" not in refusal(UsageError, tmp_path / "secret.txt")
    (tmp_path / "secret-empty").mkdir()
    assert "no image" in refusal(DataError, tmp_path / "secret-empty")
    mixed = flat(tmp_path / "secret-mixed", GREY[:2])
    (mixed / "metadata.csv").write_text("file_name,label\n0.png,cat\n1.png,\n")
    assert "some have none" in refusal(DataError, mixed)
    sizes = flat(tmp_path / "secret-sizes", GREY[:1])
    (sizes / "other.png").write_bytes(png(COLOUR[0]))
    assert "several shapes" in refusal(DataError, sizes)
    damaged = flat(tmp_path / "secret-damaged", GREY[:3])
    (damaged / "secret-1.png").write_bytes(b"no picture")
    hidden = refusal(DataError, damaged)
    assert "1 image cannot be used" in hidden and "secret" not in hidden
    assert "secret-1.png" in refusal(DataError, damaged, reveal=True)
    np.savez(tmp_path / "secret.npz", pictures=GREY)
    assert "images" in refusal(DataError, tmp_path / "secret.npz")
    np.savez(tmp_path / "secret-range.npz", images=GREY * 1.0)
    assert "secret" not in refusal(DataError, tmp_path / "secret-range.npz")
    (tmp_path / "secret.gz").write_bytes(gzip.compress(idx(GREY)[:40]))
    refusal(DataError, tmp_path / "secret.gz")


def npy(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """An array of bytes whose header says what shape it has."""
    file = io.BytesIO()
    head = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, head)
    return file.getvalue() + data


def test_files_that_lie_about_themselves_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "secret.npz", images=GREY, labels=LABELS)
    data = bytearray((tmp_path / "secret.npz").read_bytes())
    data[data.find(b"PK\x01\x02")] = 0
    (tmp_path / "secret.npz").write_bytes(data)
    (tmp_path / "secret.gz").write_bytes(b"\x1f\x8b" + bytes(20))
    (tmp_path / "deflate.gz").write_bytes(gzip.compress(idx(GREY))[:10] + b"\xff" * 20)
    for name, more in (("lie", {}), ("labelled", {"labels.npy": npy((10**6,))})):
        with zipfile.ZipFile(tmp_path / f"secret-{name}.npz", "w") as archive:
            for member, content in {"images.npy": npy((10**6, 1000, 1000)), **more}.items():
                archive.writestr(member, content)
    for name in ("secret.npz", "secret.gz", "deflate.gz", "secret-lie.npz", "secret-labelled.npz"):
        said = refusal(DataError, tmp_path / name)
        assert "cannot be read as an image set" in said and "secret" not in said, name


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "t.idx").write_bytes(idx(GREY))
    pair = f"{tmp_path / 't.idx'},{tmp_path / 'pipe'}"
    for given_ in (os.devnull, tmp_path / "pipe", pair, f"{tmp_path / 't.idx'},{tmp_path}"):
        assert "regular file" in refusal(UsageError, given_)


def test_a_set_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "bare.npz", images=GREY)
    np.savez_compressed(tmp_path / "labelled.npz", images=GREY, labels=LABELS)
    (tmp_path / "t.idx").write_bytes(idx(GREY))
    given_ = [tmp_path / "bare.npz", tmp_path / "labelled.npz", tmp_path / "t.idx",
              zipped(flat(tmp_path / "flat", GREY))]  # fmt: skip
    monkeypatch.setattr(module, "MOST_BYTES", GREY.nbytes)
    assert all(len(read_set(one, "--samples")) == len(GREY) for one in given_)
    monkeypatch.setattr(module, "MOST_BYTES", GREY.nbytes - 1)
    for one in given_:
        assert "memory" in refusal(DataError, one)


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    found = read_set(by_class(tmp_path / "a", GREY, LABELS), "--samples")
    moved = found.under(["10", "7", "1", "0"], "--samples")
    assert pairs(moved) == pairs(found) and moved.classes == ("10", "7", "1", "0")
    with pytest.raises(DataError, match="1 label that the reference lacks"):
        found.under(["0", "1"], "--samples")


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(40)), st.integers(0, 5))
def test_halves_follow_content_alone(order: list[int], copied: int) -> None:
    images = np.arange(40, dtype=np.uint8).repeat(4).reshape(40, 2, 2, 1)
    images[1] = images[copied]
    whole = ImageSet(images, np.zeros(40, np.int64), ("a",))
    first, second = halves(whole)
    again, _ = halves(whole.only(np.array(order)))
    assert {i.tobytes() for i in first.images} == {i.tobytes() for i in again.images}
    assert len(first) + len(second) == 40 and shared(first.images, second.images) == 0
    assert 5 < len(first) < 35


def test_shared_images_are_counted() -> None:
    images = (load_digits().images[:30, ..., None] * 15).astype(np.uint8)
    assert shared(images[:20], images[10:]) == 10
    assert shared(images[:10], images[10:]) == 0
