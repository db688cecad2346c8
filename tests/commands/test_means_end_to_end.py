"""Means alone with the covariance of public codes, on digits: from the plan to the replay."""

import json

import clikit
import numpy as np
import pytest
from clikit import DIGITS

from dpsynth.artifacts.moments import load_moments
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import UsageError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified
from dpsynth.public.within import WITHIN, load_spread
from dpsynth.released.gaussians import load_mixture

PLAN = """\
version: 1
name: NAME
budget: {epsilon: 3.0, delta: 1e-5}
@DIGITS@
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 12, clip_quantile: 0.8}
stages:
  moments: {covariance: public, groups: GROUPS, projection: 5}
prior: {steps: 2}
sampling: {method: release, count: 20}
""".replace("@DIGITS@", DIGITS)
STEPS = ("check", "pretrain", "release-moments", "sample")


@pytest.fixture(scope="module", params=["class", "all"])
def made(request, tmp_path_factory):
    """A plan's whole chain, and the groups that its means are of."""
    folder = tmp_path_factory.mktemp("means")
    (folder / "plan.yaml").write_text(
        PLAN.replace("NAME", "means").replace("GROUPS", request.param)
    )
    lines = ["plan plan.yaml --json", *(f"{step} runs/means --json" for step in STEPS)]
    ended = clikit.typed(folder, *lines)
    typed = {line.split()[0]: one for line, one in zip(lines, ended, strict=True)}
    for name, one in typed.items():
        assert one.code == 0, (name, one.err)
    return RunDir.open(folder / "runs" / "means"), request.param, typed


def test_the_release_has_means_of_its_groups_and_nothing_else(made):
    run, groups, typed = made
    moments = load_moments(run.released / "moments.safetensors")
    assert moments.sums.shape == (1 if groups == "all" else 10, 5)
    assert moments.seconds.size == 0
    said = json.loads(typed["plan"].out)["means"]
    assert (said["groups"], said["means"]) == (groups, len(moments.counts))


def test_the_transcript_replays_to_the_lock(made):
    run, _, _ = made
    report = replay(run.root)
    assert report.ok
    assert report.epsilon == load_verified(run.root).lock.epsilon
    assert [row.mechanism for row in report.runs[0].rows] == ["moments: class-means"]


def test_samples_come_from_released_means_and_the_public_covariance(made):
    run, groups, _ = made
    plan = load_verified(run.root).plan
    mixture, _ = load_mixture(run, plan)
    assert mixture.class_means.shape == (10, 12)
    spread = load_spread(run, plan)
    assert spread is not None
    assert np.trace(spread.total) > np.trace(spread.within)
    same = bool((mixture.class_means == mixture.class_means[0]).all())
    assert same is (groups == "all")


def test_a_public_covariance_that_was_changed_is_refused(made):
    run, _, _ = made
    plan, path = load_verified(run.root).plan, run.public / WITHIN
    kept = path.read_bytes()
    assert set(load_tensors(path)[0]) == {"covariance", "total"}
    try:
        path.write_bytes(kept[:-8] + b"\0" * 8)
        with pytest.raises(UsageError, match="calibration names"):
            load_spread(run, plan)
    finally:
        path.write_bytes(kept)
