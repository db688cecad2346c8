"""A tiny run for stories of other methods' stages: who reads the records, and what a crash leaves.

8 x 8 images in an NPZ file, two classes with records and a third, `never`, without; units of
several images where asked for.
"""

import json
import shutil
import sys

import numpy as np
from warmkit import python

from dpsynth.artifacts.spending import read_state
from dpsynth.assess.check import ensure_checked
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.public.pretrain import pretrain

PLAN = """\
version: 1
name: method
budget: {{epsilon: {epsilon}, delta: 1e-5{unit}}}
private:
  source: {{kind: npz, path: {private}}}
  capacity: 100
  image: {{height: 8, width: 8}}
  classes: [a, b, never]
  held_out: {{by: hash, fraction: 0.1}}
public:
  - {{kind: letters, count: 60}}
representation: {{kind: pca, code: 3}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3}}
"""
_watched = {"path": None, "transcript": None, "seen": []}


def _watch(event, given):
    """At each opening of the private file, note what the transcript says by then."""
    if event != "open" or _watched["path"] is None or str(given[0]) != _watched["path"]:
        return
    lines = _watched["transcript"].read_text().splitlines()
    last = json.loads(lines[-1]) if lines else {}
    _watched["seen"].append((last.get("kind"), last.get("mechanism")))


sys.addaudithook(_watch)


def watched(verified, work):
    """What `work` gives, and the last line of the transcript at each opening of the records."""
    path, transcript = str(verified.plan.private.source.path), verified.run.transcript
    _watched.update(path=path, transcript=transcript, seen=[])
    try:
        return work(verified), list(_watched["seen"])
    finally:
        _watched.update(path=None)


def prepared(folder, stages, *, images=50, unit=0, epsilon=3.0):
    """A run folder, checked and pretrained; with `unit` patients of that many images each."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 255, (images, 8, 8), dtype=np.uint8),
        "labels": rng.integers(0, 2, images),
    }
    column = ""
    if unit:
        arrays["patient"] = np.arange(images) // unit
        column = f", unit: {{column: patient, most: {unit}}}"
    np.savez(folder / "private.npz", **arrays)
    plan = folder / "plan.yaml"
    given = {"private": folder / "private.npz", "unit": column, "epsilon": epsilon}
    plan.write_text(PLAN.format(**given) + stages)
    verified = make_run(plan, folder / "run")
    pretrain(verified)
    ensure_checked(verified)
    return verified


def copied(folder, target):
    """A fresh copy of a prepared run; its private file stays where it is."""
    shutil.copytree(folder / "run", target)
    return load_verified(target)


class Crash(BaseException):
    """What a patched failpoint raises, where a real one kills."""


def crashing(monkeypatch, point, *modules):
    """Let the failpoint `name@visit` of these modules raise `Crash`."""
    name, _, visit = point.partition("@")
    left = [int(visit or 1)]

    def reach(here):
        left[0] -= here == name
        if here == name and left[0] == 0:
            raise Crash

    for module in modules:
        monkeypatch.setattr(module, "reach", reach)


def killed(verified, point, code):
    """Run `code` with `verified` in a process of its own that dies at a named point."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from dpsynth.planning.verify import load_verified\n"
        f"verified = load_verified(Path(sys.argv[1]))\n{code}\n"
    )
    environment = {"DPSYNTH_KILL_AT": point}
    return python(program, verified.run.root, environment=environment).returncode


def counts(verified):
    """How many slots are settled, and how many forfeited."""
    state = read_state(verified.run, verified.lock)
    return len(state.settled), len(state.forfeited)


def holds(folder, array):
    """Files below a folder that hold the numbers of `array`, in any of the usual widths or as text.

    An array of several different numbers: one number alone stands everywhere.
    """
    flat = np.asarray(array).reshape(-1)
    kinds = (np.int64, np.int32, np.uint8, np.float64, np.float32)
    wanted = [flat.astype(kind).tobytes() for kind in kinds if (flat.astype(kind) == flat).all()]
    wanted += [json.dumps(flat.tolist()).encode(), json.dumps([float(x) for x in flat]).encode()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(one in path.read_bytes() for one in wanted)]
