"""A run with a charged evaluation, planned and pretrained, its moments released."""

import json
import shutil

import numpy as np

from dpsynth.assess.check import check
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.private.moments import release_moments
from dpsynth.public.pretrain import pretrain

CLASSES = [*"0123456789", "never"]
PLAN = """\
version: 1
name: story
budget: {{epsilon: 9.0, delta: 1e-5{unit}}}
private:
  source: {{kind: npz, path: {folder}/train.npz}}
  capacity: 500
  image: {{height: 8, width: 8}}
  classes: {classes}
  held_out: {held_out}
public: [{{kind: letters, count: 300}}]
representation: {{kind: pca, code: 6}}
stages:
  moments: {{covariance: shared, weight: 2.0}}
  evaluation: {{weight: 1.0}}
{train}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 1}}
sampling: {{method: release, count: 110}}
evaluation: {{probe_epochs: 30}}
"""
BY_SOURCE = "{{by: source, source: {{kind: npz, path: {folder}/test.npz}}}}"
# Every record in every step: composing plain Gaussians takes no time.
TRAIN = "  train: {weight: 0.3, rate: 1.0, steps: 2, chunk: 1, multiplicity: 1}"
HELD = 150


def records():
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    return np.rint(values * 15.9375).astype(np.uint8).reshape(-1, 8, 8), labels.astype(np.int64)


def planned(folder, *, held_out=BY_SOURCE, unit="", training=""):
    images, labels = records()
    owners = np.arange(500) // 5
    np.savez(folder / "train.npz", images=images[:500], labels=labels[:500], owner=owners)
    np.savez(folder / "test.npz", images=images[500 : 500 + HELD], labels=labels[500 : 500 + HELD])
    held = held_out.format(folder=folder)
    text = PLAN.format(
        folder=folder, classes=json.dumps(CLASSES), held_out=held, unit=unit, train=training
    )
    (folder / "plan.yaml").write_text(text)
    verified = make_run(folder / "plan.yaml", folder / "run")
    check(verified)
    pretrain(verified)
    release_moments(verified)
    return verified


def copied(begun, folder):
    """The same run elsewhere, with held-out records of its own."""
    shutil.copytree(begun.run.root.parent, folder, dirs_exist_ok=True)
    text = (folder / "plan.yaml").read_text().replace(str(begun.run.root.parent), str(folder))
    (folder / "plan.yaml").write_text(text)
    make_run(folder / "plan.yaml", folder / "run")
    return load_verified(folder / "run")
