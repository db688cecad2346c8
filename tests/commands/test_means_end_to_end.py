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
GROUPS = ("class", "all")


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """The folder of both plans' runs, and how each line of their whole chains ended."""
    folder, lines = tmp_path_factory.mktemp("means"), []
    for groups in GROUPS:
        text = PLAN.replace("NAME", groups).replace("GROUPS", groups)
        (folder / f"{groups}.yaml").write_text(text)
        steps = [f"{step} runs/{groups} --json" for step in STEPS]
        lines += [f"plan {groups}.yaml --json", *steps]
    ended = dict(zip(lines, clikit.typed(folder, *lines), strict=True))
    for line, one in ended.items():
        assert one.code == 0, (line, one.err)
    return folder, ended


@pytest.fixture(params=GROUPS)
def made(request, chains):
    """A plan's whole chain, and the groups that its means are of."""
    folder, ended = chains
    run = RunDir.open(folder / "runs" / request.param)
    typed = {line.split()[0]: one for line, one in ended.items() if request.param in line}
    return run, request.param, typed


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
