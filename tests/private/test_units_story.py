"""Plans of several images a patient, from check to close; the guide's own example as typed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from unitkit import joined
from warmkit import python

from dpsynth.artifacts.cells import load_cells
from dpsynth.artifacts.moments import load_moments
from dpsynth.assess.check import check
from dpsynth.errors import DataError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import make_run
from dpsynth.private.dpsgd import train
from dpsynth.private.encoding import private_stream
from dpsynth.private.moments import release_moments
from dpsynth.public.pretrain import pretrain
from dpsynth.public.representation import load_representation
from dpsynth.released.handout import hand_out

GUIDE = Path(__file__).parents[2] / "docs" / "custodian.md"
PLAN = """\
version: 1
name: patients
budget: {{epsilon: 3.0, delta: 1e-5, unit: {unit}}}
private:
  source: {{kind: npz, path: {path}}}
  capacity: 60
  image: {{height: 8, width: 8}}
  classes: [a, b, never]
  held_out: {{by: hash, fraction: 0.1}}
public:
  - {{kind: letters, count: 60}}
representation: {{kind: pca, code: 3}}
stages:
  moments: {{weight: 0.8, least_count: 1.0, cells: {{most: 2, lloyd: 1}}}}
  train: {{weight: 0.2, rate: 0.5, steps: 4, chunk: 2, multiplicity: 3, buckets: 2}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
sampling: {{method: flow, count: 20, steps: 2}}
"""
CHAIN = """
import json, sys
from dpsynth.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv = line
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def planned(folder, patients, unit="{column: patient, most: 4}"):
    rng = np.random.default_rng(0)
    n = len(patients)
    images, labels = rng.integers(0, 255, (n, 8, 8), dtype=np.uint8), rng.integers(0, 2, n)
    np.savez(folder / "private.npz", images=images, labels=labels, patient=patients)
    (folder / "plan.yaml").write_text(PLAN.format(path=folder / "private.npz", unit=unit))
    return make_run(folder / "plan.yaml", folder / "run", unsafe_seed=3)


def test_a_plan_of_patients_from_check_to_hand_out(tmp_path):
    patients = np.random.default_rng(1).permutation(np.arange(200) % 40)
    verified = planned(tmp_path, patients)
    found = check(verified)
    kept, over = found["units"]["train"]["count"], found["units"]["train"]["over"]
    assert kept + found["units"]["held_out"]["count"] == 40
    assert over == kept  # five images each, of which four count
    pretrain(verified)
    release_moments(verified)
    released = verified.run.released
    moments, cells = (
        load_moments(released / "moments.safetensors"),
        load_cells(released / "cells.safetensors"),
    )
    assert np.isfinite(moments.seconds).all()
    assert np.isfinite(cells.seconds).all()
    data = joined(private_stream(verified, load_representation(verified.run, verified.plan)))
    assert data.sizes.tolist() == [4] * kept
    train(verified)
    log = (verified.run.curator / "training.jsonl").read_text().splitlines()
    assert len(log) == 4
    assert all(json.loads(line)["batch"] <= kept for line in log)
    hand_out(verified.run)
    report = replay(verified.run.released)
    assert report.runs[0].budget["unit"] == {"column": "patient", "most": 4}
    assert report.runs[0].closed
    assert report.epsilon <= 3.0
    card = (released / "card.md").read_text()
    assert "one patient (column patient), up to 4 images" in card
    assert "Declared number of units: 60." in card


def test_a_patient_without_a_name_stops_the_check(tmp_path):
    patients = np.array([f"p{n % 5}" for n in range(19)] + [""])
    with pytest.raises(DataError, match="1 record does not fit"):
        check(planned(tmp_path, patients))


def test_the_guides_example_runs_as_typed(tmp_path):
    section = GUIDE.read_text().split("## Several images of one patient")[1].split("\n## ")[0]
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))
    (tmp_path / "plan.yaml").write_text(blocks["yaml"])
    lines = [line.split() for line in blocks["sh"].splitlines()]
    assert [line[1] for line in lines] == [
        "plan", "check", "pretrain", "release-moments", "sample", "replay",
    ]  # fmt: skip
    code = f"{blocks['python']}\n{CHAIN}"
    done = python(code, json.dumps(lines), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the transcript holds" in done.stdout
    card = (tmp_path / "runs/patients/released/card.md").read_text()
    assert "one patient (column patient), up to 8 images" in card
