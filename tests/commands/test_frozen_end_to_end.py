"""A frozen text-to-image prior as typed, offline, on a tiny checkpoint: plan to replay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clikit import typed
from frozenkit import tiny_sd3

from dpsynth.artifacts.moments import load_moments
from dpsynth.artifacts.samples import read_samples

pytest.importorskip("diffusers")

PLAN = """\
version: 1
name: frozen
budget: {epsilon: 2.0, delta: 1e-4}
private:
  source: {kind: npz, path: private.npz}
  capacity: 60
  image: {height: 16, width: 16, channels: 3}
  classes: [cat, dog]
  held_out: {by: hash, fraction: 0.2}
public: [{kind: prior, count: 12}]
representation: {kind: latent, clip_quantile: 0.95}
prior:
  kind: diffusers
  model: ./sd3
  latent: {channels: 4, height: 4, width: 4}
  prompt: "a photo of a {label}"
stages:
  moments: {covariance: public, groups: auto, projection: 4}
sampling: {method: guide, start: 0.05, steps: 4, guidance: 3.0, count: 6}
"""
LINES = {
    "plan": "plan frozen.yaml --json",
    "early": "guide runs/frozen",
    "pretrain": "pretrain runs/frozen --json --batch 4",
    "pretrain again": "pretrain runs/frozen --json",
    "check": "check runs/frozen",
    "release": "release-moments runs/frozen --json",
    "guide": "guide runs/frozen --json",
    "sigma": "guide runs/frozen --sigma 0.9 -n 4 --json",
    "zero": "guide runs/frozen --mean zero -n 4",
    "random": "guide runs/frozen --mean random -n 4",
    "public": "guide runs/frozen --mean public -n 4",
    "both": "guide runs/frozen --sigma 0.9 --start 0.1",
    "beyond": "guide runs/frozen --sigma 1.5",
    "device": "guide runs/frozen --device tpu -n 3",
    "replay": "replay runs/frozen/released --json",
}
WRONG = {"early": 6, "both": 2, "beyond": 2, "device": 2}
OFFLINE = """\
import socket


def refuse(*_, **__):
    raise OSError("no network in this test")


socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The run's folder, and exit code, stdout and stderr of each line."""
    folder = tmp_path_factory.mktemp("frozen")
    tiny_sd3(folder / "sd3")
    (folder / "frozen.yaml").write_text(PLAN)
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (60, 16, 16, 3), np.uint8)
    np.savez(folder / "private.npz", images=images, labels=np.arange(60) % 2)
    (folder / "offline").mkdir()
    (folder / "offline" / "sitecustomize.py").write_text(OFFLINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "offline"))
        found = [[one.code, one.out, one.err] for one in typed(folder, *LINES.values(), fresh=True)]
    return folder / "runs/frozen", dict(zip(LINES, found, strict=True))


@pytest.mark.parametrize("name", LINES)
def test_every_line_ends_as_it_should(story: tuple[Path, dict[str, list[Any]]], name: str) -> None:
    code, _, said = story[1][name]
    assert code == WRONG.get(name, 0), said
    assert "Traceback" not in said


def test_the_plan_s_groups_are_what_was_released(story: tuple[Path, dict[str, list[Any]]]) -> None:
    run, _ = story
    lock = json.loads((run / "plan.lock.json").read_text())
    moments = load_moments(run / "released/moments.safetensors")
    assert moments.classes == lock["slots"][0]["statistic"]["classes"]
    assert moments.sums.shape[1] == 4 and moments.covariance == "public"


def test_pretraining_once_is_enough(story: tuple[Path, dict[str, list[Any]]]) -> None:
    _, said = story
    assert json.loads(said["pretrain"][1]) == json.loads(said["pretrain again"][1])
    assert "all there already" in said["pretrain again"][2]
    assert "text encoders" not in said["guide"][2]


def test_a_sigma_beyond_one_is_named_as_it_was_typed(
    story: tuple[Path, dict[str, list[Any]]],
) -> None:
    assert "--sigma 1.5: expected 0 < sigma < 1\ntry: --sigma 0.95" in story[1]["beyond"][2]


def test_the_card_names_no_second_moments_where_means_alone_were_released(
    story: tuple[Path, dict[str, list[Any]]],
) -> None:
    card = (story[0] / "released/card.md").read_text()
    assert "noisy counts and sums of codes, without second moments" in card


def test_samples_say_where_they_start(story: tuple[Path, dict[str, list[Any]]]) -> None:
    run, _ = story
    origins = {
        name: json.loads((run / f"released/samples{name}.json").read_text())["origin"]
        for name in ("", "-guided", "-guided-zero-mean")
    }
    assert (origins[""]["start"], origins["-guided"]["start"]) == (0.05, 0.1)
    assert origins["-guided-zero-mean"]["mean"] == "zero"
    images, labels = read_samples(run / "released/samples", ["cat", "dog"])
    assert images.shape == (6, 16, 16, 3) and labels.tolist() == [0, 1] * 3


def test_the_hand_out_names_the_weights_and_has_none(
    story: tuple[Path, dict[str, list[Any]]],
) -> None:
    run, said = story
    assert json.loads(said["replay"][1])["ok"] is True
    calibration = json.loads((run / "released/public/calibration.json").read_text())
    assert len(calibration["weights_sha256"]) == 64
    assert not (run / "released/public/prior.safetensors").exists()
