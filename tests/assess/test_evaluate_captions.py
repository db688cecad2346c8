"""A caption plan's evaluation: attributes slot by slot, and LPIPS blank without weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpsynth.artifacts.samples import write_samples
from dpsynth.assess.evaluate import evaluate
from dpsynth.models import lenet
from dpsynth.planning.verify import make_run

TONES = ("light", "dark")
PLAN = """
version: 1
name: words
budget: {epsilon: 3, delta: 1e-5}
private:
  source: {kind: npz, path: digits.npz, captions: texts}
  capacity: 600
  image: {height: 8, width: 8}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  captions: {kind: template, template: "a {tone} {class}", slots: {tone: [light, dark]}}
  held_out: {by: hash, fraction: 0.3}
public:
  - {kind: letters, count: 100}
representation: {kind: pca, code: 8}
stages: {moments: {covariance: shared, captions: {features: slots}}}
evaluation: {probe_epochs: 1, feature_epochs: 1}
"""


def test_attributes_of_a_template_are_measured_slot_by_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lenet, "LEAST_STEPS", 40)
    monkeypatch.setattr("dpsynth.assess.domain.STEPS", 4)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "no-hub"))
    data = load_digits()
    tone = np.random.default_rng(0).integers(0, 2, len(data.target))
    images = (data.images * 8).astype(np.uint8)[..., None]
    images[tone == 1] = 255 - images[tone == 1]
    texts = [f"a {TONES[t]} {label}" for t, label in zip(tone, data.target, strict=True)]
    np.savez(tmp_path / "digits.npz", images=images[:600], labels=data.target[:600],
             texts=np.array(texts[:600]))  # fmt: skip
    (tmp_path / "plan.yaml").write_text(PLAN)
    verified = make_run(tmp_path / "plan.yaml", tmp_path / "run")
    # Every fourth sample is of the other tone than its caption says.
    asked = [
        text.replace("light", "x").replace("dark", "light").replace("x", "dark") if i % 4 == 0
        else text
        for i, text in enumerate(texts[600:1000])
    ]  # fmt: skip
    labels = data.target[600:1000].astype(np.int64)
    classes = [str(n) for n in range(10)]
    folder = verified.run.released / "samples"
    write_samples(folder, images[600:1000], labels, classes, texts=asked)
    report = evaluate(verified)
    slots = report["attributes"]["slots"]
    assert list(slots) == ["tone", "class", "all slots"]
    assert slots["tone"]["synthetic"] == pytest.approx(0.75, abs=0.03)
    assert slots["tone"]["ceiling"] > 0.97 and 0.5 <= slots["tone"]["floor"] < 0.6
    low, high = slots["tone"]["interval"]
    assert low < 0.75 < high and high - low < 0.12
    assert slots["all slots"]["synthetic"] <= min(slots["tone"]["synthetic"], 0.8)
    assert report["lpips"] is None and "AlexNet" in capsys.readouterr().err
    assert json.loads((verified.run.curator / "evaluation.json").read_text()) == report
