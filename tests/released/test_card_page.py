"""`released/card.html`: the public half of the report, of released files alone."""

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from browserkit import look
from pagekit import EVIL, finished, planned, require_inert
from PIL import Image

from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.manifest import check_manifest
from dpsynth.artifacts.moments import load_moments
from dpsynth.artifacts.samples import read_samples
from dpsynth.artifacts.transcript import Transcript, read_transcript
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.card_page import NAME, build_card_page
from dpsynth.released.handout import _samples, hand_out
from dpsynth.released.page.gallery import COLUMNS, HandOut, gallery
from dpsynth.released.page.means import class_means

SECRET = "0.7320508075688772"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> VerifiedPlan:
    return finished(tmp_path_factory.mktemp("card"), EVIL)


@pytest.fixture(scope="module")
def html(run: VerifiedPlan) -> str:
    for name in ("evaluation.json", "check.json", "audit.json"):
        (run.run.curator / name).write_text(json.dumps({"accuracy": float(SECRET)}))
    hand_out(run.run)
    return (run.run.released / NAME).read_text()


def built(folder: Path) -> str:
    lock, transcript = (
        read_lock(folder / "plan.lock.json"),
        read_transcript(folder / "transcript.jsonl"),
    )
    files = ["moments.safetensors", "public/geometry.safetensors", "public/calibration.json",
             "contact-sheet.png", "public/within.safetensors"]  # fmt: skip
    return build_card_page(lock, transcript, _samples(folder), files, folder=folder)


def pixels(uri: str) -> np.ndarray:
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)))


def test_it_loads_nothing_and_names_stay_text(html: str) -> None:
    page = require_inert(html)
    for name in EVIL:
        assert name in page.text
    assert not page.all("script")


def test_it_is_handed_out_and_vouched_for(run: VerifiedPlan, html: str) -> None:
    assert NAME in check_manifest(run.run.released)["files"]


def test_a_copy_without_the_run_gives_the_same_page(
    run: VerifiedPlan, html: str, tmp_path: Path
) -> None:
    """Nothing but the hand-out goes into it: no curator room is there to look into."""
    copy = Path(shutil.copytree(run.run.released, tmp_path / "received"))
    assert built(copy) == built(run.run.released)
    with pytest.raises(LookupError):
        _ = HandOut(copy).curator


def test_no_curator_value_and_no_path_is_in_it(run: VerifiedPlan, html: str) -> None:
    assert SECRET[:6] not in html
    assert str(run.run.root.parent) not in html


def test_it_says_what_the_card_says(run: VerifiedPlan, html: str) -> None:
    text = " ".join(require_inert(html).text.split())
    for said in ("Spent: epsilon", "Declared number of records: 1,800", "Timing, crashes",
                 "dpsynth replay", "moments.safetensors", "membership advantage"):  # fmt: skip
        assert said in text, said
    assert read_transcript(run.run.transcript).head in html


def test_pictures_are_the_samples_and_the_decoded_means(run: VerifiedPlan) -> None:
    released, private = run.run.released, run.plan.private
    found = gallery(HandOut(released), run.plan, {})
    images, labels = read_samples(released / "samples", private.classes)
    for y, row in enumerate(found.rows):
        own = images[labels == y][:COLUMNS]
        assert len(row.samples) == len(own)
        for uri, image in zip(row.samples, own, strict=True):
            assert (pixels(uri) == image[..., 0]).all()
    moments = load_moments(released / "moments.safetensors")
    # A decoder written otherwise: PCA by hand, from the file's own arrays.
    from dpsynth.artifacts.tensors import load_tensors

    arrays, _ = load_tensors(released / "public" / "geometry.safetensors")
    raw = class_means(moments) * arrays["scale"][0] + arrays["mean"]
    expected = 255 * np.clip(raw @ arrays["basis"] + arrays["centre"], 0, 1).reshape(-1, 8, 8)
    for row, mean in zip(found.rows, expected, strict=True):
        assert row.mean is not None
        assert np.abs(pixels(row.mean).astype(float) - mean).max() <= 0.51


def test_a_charged_evaluation_is_shown_and_its_class_names_stay_text(run: VerifiedPlan) -> None:
    def score(value: float | None) -> dict[str, float | None]:
        return {"value": value, "error": 0.03, "low": 0.1, "high": 0.9}

    scores = {
        "accuracy": score(0.8125), "level": 0.95, "records": score(500.0), "of_samples": "samples",
        "samples": {"count": 36},
        "per_class": [{"class": n, "recall": score(0.5), "precision": score(None)} for n in EVIL],
    }  # fmt: skip
    lock, transcript = run.lock, read_transcript(run.run.transcript)
    page = require_inert(build_card_page(lock, transcript, {}, [], scores, folder=run.run.released))
    assert "0.812 (0.100 to 0.900)" in page.text
    assert "Scores of each class" in page.text
    assert all(page.text.count(name) >= 3 for name in EVIL)  # contents, scores, pictures


def test_means_that_noise_hides_are_not_shown(run: VerifiedPlan, tmp_path: Path) -> None:
    from dataclasses import replace

    from dpsynth.artifacts.moments import save_moments

    copy = Path(shutil.copytree(run.run.released, tmp_path / "received"))
    moments = load_moments(copy / "moments.safetensors")
    save_moments(
        copy / "moments.safetensors",
        replace(moments, counts=np.array([300.0, -4.0, 2.0, 300.0])),
    )
    found = gallery(HandOut(copy), run.plan, {})
    assert [row.mean is not None for row in found.rows] == [True, False, False, True]
    assert any("noise hides it" in note for note in found.notes)


@pytest.mark.parametrize("lost", ["public/geometry.safetensors", "samples/images/0000001.png"])
def test_what_cannot_be_read_is_said_without_a_path(
    run: VerifiedPlan, tmp_path: Path, lost: str
) -> None:
    copy = Path(shutil.copytree(run.run.released, tmp_path / "received"))
    (copy / lost).write_bytes(b"no such thing")
    html = built(copy)
    assert "could not be" in html
    assert str(tmp_path) not in html
    require_inert(html)


def test_a_run_that_spent_nothing_has_a_card(tmp_path: Path) -> None:
    verified = planned(tmp_path, ["a", "b"])
    html = build_card_page(verified.lock, Transcript((), 0), {}, [], folder=verified.run.released)
    page = require_inert(html)
    for said in ("Nothing was spent yet", "No images were drawn yet", "No moments were released"):
        assert said in page.text
    assert html == build_card_page(
        verified.lock, Transcript((), 0), {}, [], folder=verified.run.released
    )


@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_a_phone_and_a_desk(
    run: VerifiedPlan, html: str, tmp_path: Path, width: int
) -> None:
    seen = look(run.run.released / NAME, width, tmp_path)
    assert (seen.width, seen.needed, seen.wide) == (width, width, [])
    assert seen.images == 4 * (1 + 9)
    assert (seen.broken, seen.scripts) == (0, 0)
