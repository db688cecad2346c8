"""Plans on the LL0 band of a wavelet, and the commands of each, for end-to-end tests.

Built-in digits of 8x8: one level leaves 4x4. Each step is the command line's own `main`; the steps
of a story share one process, for torch to load once.
"""

import json
from pathlib import Path

from clikit import DIGITS, Typed, typed
from safetensors.numpy import load_file

PLAN = """\
version: 1
name: @NAME@
budget: {epsilon: 8.0, delta: 1e-5}
@DIGITS@
public: [{kind: letters, count: 300}]
representation: {kind: wavelet, wavelet: @WAVELET@, levels: 1, clip_quantile: 0.8}
@REST@
""".replace("@DIGITS@", DIGITS)
SMALL = "velocity: {width: 8, depth: 1}\nprior: {steps: 2, batch: 32}\n"
RESTS = {
    "shared": "stages: {moments: {covariance: shared}}\n" + SMALL + "sampling: {count: 300}",
    "cells": "stages: {moments: {cells: {most: 2, lloyd: 1}}}\n"
    + SMALL
    + "sampling: {count: 40, sharpen: public, augment: {}}",
    "captions": "stages: {moments: {covariance: shared, captions: {features: one-hot}}}\n"
    + SMALL
    + "sampling: {count: 40}",
    "guided": "stages: {moments: {projection: 8}}\n"
    + SMALL
    + "sampling: {method: guide, count: 40, steps: 3}",
    "flow": """\
stages:
  moments: {weight: 0.2}
  train: {weight: 0.65, rate: 1.0, steps: 4, chunk: 2, buckets: 2, multiplicity: 1}
velocity: {kind: mmdit, width: 8, depth: 1, heads: 2, patch: 2}
prior: {steps: 2, batch: 32}
distillation: {steps: 2, batch: 32, cap: 0.6}
sampling: {method: flow, count: 40, steps: 2}""",
}
WAVELETS = {"cells": "db2", "captions": "sym4"}
EACH = {
    "plan": "plan {0}.yaml --json",
    "check": "check runs/{0}",
    "pretrain": "pretrain runs/{0} --json",
    "release": "release-moments runs/{0} --json",
    "sample": "sample runs/{0} --json",
    "replay": "replay runs/{0}/released --json",
}


def lines_of(name: str) -> dict[str, str]:
    """The commands of one plan, in order."""
    lines = {f"{name} {step}": line.format(name) for step, line in EACH.items()}
    if name != "flow":
        return lines
    before = {key: line for key, line in lines.items() if "sample" not in key}
    replayed = before.pop("flow replay")
    after = {"flow sample": lines["flow sample"], "flow replay": replayed}
    return before | {"flow train": "train runs/flow --json"} | after


def played(folder: Path, names: tuple[str, ...], *more: str) -> dict[str, Typed]:
    """How each command of these plans ended, and of the lines after them."""
    for name in names:
        text = PLAN.replace("@NAME@", name).replace("@REST@", RESTS[name])
        text = text.replace("@WAVELET@", WAVELETS.get(name, "haar"))
        (folder / f"{name}.yaml").write_text(text)
    lines = {key: line for name in names for key, line in lines_of(name).items()}
    lines |= {line.split()[0]: line for line in more}
    return dict(zip(lines, typed(folder, *lines.values()), strict=True))


def assert_all_went_well(folder: Path, said: dict[str, Typed], names: tuple[str, ...]) -> None:
    """Every command ended well, what was released is of the band, and the hand-out replays."""
    for line, one in said.items():
        assert one.code == 0, f"{line}\n{one.err}"
        assert "Traceback" not in one.err, f"{line}\n{one.err}"
    for name in names:
        dim = 8 if name == "guided" else 16
        assert json.loads(said[f"{name} release"].out)["dim"] == dim
        lock = json.loads((folder / f"runs/{name}/plan.lock.json").read_text())
        assert lock["facts"]["representation"]["code"] == 16
        assert all(slot["statistic"].get("dim", dim) == dim for slot in lock["slots"])
        assert json.loads(said[f"{name} replay"].out)["epsilon"] <= 8.0
        kept = load_file(folder / f"runs/{name}/public/geometry.safetensors")
        assert kept["rows"].shape == kept["columns"].shape == (4, 8)
