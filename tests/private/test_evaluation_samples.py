"""What a charged evaluation takes for its samples, its source and its scores: nothing forged."""

import json
import shutil
import sys

import pytest
from evaluationkit import CLASSES, copied, planned, records
from PIL import Image

from dpsynth.artifacts.manifest import write_manifest
from dpsynth.artifacts.samples import content_digest, summary_path, write_samples
from dpsynth.artifacts.spending import Spender
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.assess.report.parts import charged_scores
from dpsynth.commands.replay import replay as replay_command
from dpsynth.errors import BudgetError, MissingError, ReplayError, UsageError
from dpsynth.models import lenet
from dpsynth.planning.replay import replay
from dpsynth.private.confusion import release_evaluation
from dpsynth.released import probe
from dpsynth.released.handout import hand_out
from dpsynth.released.sampling import sample

FOLDER = "{{by: source, source: {{kind: folder, path: {folder}/test}}}}"


@pytest.fixture(scope="module", autouse=True)
def few_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lenet, "LEAST_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that sampled, and is still open; its held-out records are a folder."""
    folder = tmp_path_factory.mktemp("begun")
    images, labels = records()
    for place in range(500, 530):
        (folder / "test" / str(labels[place])).mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[place]).save(folder / "test" / str(labels[place]) / f"{place}.png")
    verified = planned(folder, held_out=FOLDER)
    sample(verified)
    return verified


@pytest.fixture(scope="module")
def released(begun, tmp_path_factory):
    verified = copied(begun, tmp_path_factory.mktemp("released"))
    release_evaluation(verified)
    return verified


def charges(verified):
    lines = read_transcript(verified.run.transcript).lines
    return [line["mechanism"] for line in lines if line["kind"] == "charge"]


def private_picture(samples):
    Image.fromarray(records()[0][0]).save(samples / "images" / "0000000.png")


def private_records(samples):
    images, labels = records()
    write_samples(samples, images[:110, ..., None], labels[:110], CLASSES)


def of_an_older_version(samples):
    path = summary_path(samples)
    summary = json.loads(path.read_text())
    del summary["content_sha256"]
    path.write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (private_picture, "a file changed"),
        (private_records, "not the plan's own"),
        (of_an_older_version, "kept no digest"),
    ],
)
def test_the_probe_learns_from_what_the_sampler_drew_alone(begun, tmp_path, change, said):
    verified = copied(begun, tmp_path)
    samples = verified.run.released / "samples"
    change(samples)
    with pytest.raises(UsageError, match=f"{said}.*nothing was charged") as found:
        release_evaluation(verified)
    assert "confusion" not in charges(verified)
    assert found.value.hint.startswith("remove released/samples.json")
    summary_path(samples).unlink()
    sample(verified)
    release_evaluation(verified)


def test_the_probe_learns_from_what_is_released_now(begun, tmp_path):
    """Samples of other moments than those that lie there are no function of earlier outputs."""
    verified = copied(begun, tmp_path)
    path = summary_path(verified.run.released / "samples")
    summary = json.loads(path.read_text())
    summary["origin"]["moments_sha256"] = "0" * 64
    path.write_text(json.dumps(summary))
    with pytest.raises(UsageError, match="of other files than now"):
        release_evaluation(verified)


def test_samples_that_change_under_the_probe_cost_nothing(begun, tmp_path, monkeypatch):
    verified = copied(begun, tmp_path)
    real = probe.train_probe

    def swapping(*given, **named):
        private_picture(verified.run.released / "samples")
        return real(*given, **named)

    monkeypatch.setattr(probe, "train_probe", swapping)
    with pytest.raises(UsageError, match="changed while the probe learned"):
        release_evaluation(verified)
    assert "confusion" not in charges(verified)


def test_no_held_out_record_decides_whether_the_stage_runs(begun, tmp_path):
    verified = copied(begun, tmp_path)
    shutil.move(tmp_path / "test", tmp_path / "away")
    with pytest.raises(MissingError, match="nothing was charged"):
        release_evaluation(verified)
    shutil.move(tmp_path / "away", tmp_path / "test")
    (tmp_path / "test" / "0" / "patient.png").symlink_to(tmp_path / "nowhere")
    release_evaluation(verified)


def test_a_crash_before_the_hand_out_is_mended_by_typing_it_again(begun, tmp_path, monkeypatch):
    verified = copied(begun, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Spender, "close", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            release_evaluation(verified)
    assert not (verified.run.released / "evaluation.json").exists()
    with pytest.raises(BudgetError, match="released already"):
        release_evaluation(verified)
    assert (verified.run.released / "evaluation.json").is_file()
    report = replay(verified.run.released)
    assert report.ok
    assert report.runs[0].closed


def forge(folder):
    path = folder / "evaluation.json"
    said = json.loads(path.read_text())
    said["accuracy"] |= {"value": 0.999, "low": 0.99, "high": 1.0}
    path.write_text(json.dumps(said))
    shutil.copy(folder / "contact-sheet.png", folder / "confusion.png")


def test_forged_scores_are_neither_shown_nor_handed_out(released, tmp_path):
    verified = copied(released, tmp_path)
    folder = verified.run.released
    before = [(folder / name).read_bytes() for name in ("evaluation.json", "confusion.png")]
    forge(folder)
    told = charged_scores(verified.run, verified.lock)
    assert told["accuracy"] == json.loads(before[0])["accuracy"]
    assert told["of_samples"] == "samples"
    hand_out(verified.run)
    assert [(folder / n).read_bytes() for n in ("evaluation.json", "confusion.png")] == before
    assert "0.999" not in (folder / "card.md").read_text()


def test_replay_recomputes_the_scores(released, tmp_path, monkeypatch, capsys):
    folder = copied(released, tmp_path).run.released
    replay_command([folder])
    assert "not recomputed" not in capsys.readouterr().out
    forge(folder)
    write_manifest(folder, epsilon=json.loads((folder / "manifest.json").read_text())["epsilon"])
    assert replay(folder).ok  # the transcript's part
    with pytest.raises(ReplayError, match=r"not what confusion\.safetensors says: accuracy"):
        replay_command([folder])
    monkeypatch.setitem(sys.modules, "safetensors", None)
    replay_command([folder])
    assert "was not recomputed" in " ".join(capsys.readouterr().out.split())


def test_the_digest_in_the_summary_is_of_all_that_was_written(begun):
    samples = begun.run.released / "samples"
    summary = json.loads(summary_path(samples).read_text())
    assert summary["content_sha256"] == content_digest(samples)
