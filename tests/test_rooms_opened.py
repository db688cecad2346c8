"""Which commands open private files, seen by an audit hook in the process that runs them.

Planning, public, post-processing and replay commands open none. The commands that may open them
run under the same hook and are caught, so that this test can fail. Each command is a process of its
own, which imports the package under the hook.
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from clikit import python

HARNESS = """
import json, os, sys
private, report, *arguments = sys.argv[1:]
opened = []

def watch(event, given):
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    try:
        path = os.path.realpath(os.fsdecode(given[0]))
    except TypeError:  # a descriptor, or None
        return
    if path == private or path.startswith(private + os.sep):
        opened.append(os.path.basename(path))

sys.addaudithook(watch)
sys.argv = ["dpsynth", *arguments]
from dpsynth.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
with open(report, "w") as file:
    json.dump({"code": code, "opened": opened}, file)
"""

PLAN = """\
version: 1
name: watched
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: idx, images: {private}/train-images, labels: {private}/train-labels}}
  capacity: 500
  image: {{height: 8, width: 8}}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out:
    by: source
    source: {{kind: npz, path: {private}/test.npz}}
public:
  - {{kind: letters, count: 300}}
representation: {{kind: pca, code: 6}}
stages:
  moments: {{weight: 0.8}}
  train: {{weight: 0.2, rate: 0.1, steps: 4, chunk: 2, multiplicity: 2, buckets: 2}}
velocity: {{kind: mlp, width: 16, depth: 2}}
tokens:
  levels: 1
  tokenizer: {{patches: [2, 2], hidden: 16, depth: 1, heads: 2, codebook: 16, code: 4, steps: 40,
    batch: 32}}
  transformer: {{width: 16, depth: 1, heads: 2, text: {{width: 8, length: 2}}}}
prior: {{steps: 10, batch: 32}}
distillation: {{steps: 10, batch: 32}}
sampling: {{method: flow, count: 20, steps: 3}}
"""


@dataclass(frozen=True)
class Watched:
    """How one command ended and what it opened under the private folder."""

    code: int
    opened: list[str]
    said: str


def write_private(folder: Path) -> None:
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    images = np.rint(values * 15.9375).astype(np.uint8).reshape(-1, 8, 8)
    folder.mkdir()
    for name, array in (("train-images", images[:400]), ("train-labels", labels[:400])):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(head + array.astype(np.uint8).tobytes())
    np.savez(folder / "test.npz", images=images[400:500], labels=labels[400:500])


def watch(root: Path, *arguments: str) -> Watched:
    report = root / "report.json"
    report.unlink(missing_ok=True)
    private = os.path.realpath(root / "private")
    done = python(HARNESS, private, report, *arguments, folder=root)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    return Watched(found["code"], found["opened"], done.stdout + done.stderr)


COMMANDS = {
    "plan": ("plan", "plan.yaml", "--run", "run"),
    "pretrain": ("pretrain", "run"),
    "check": ("check", "run"),
    "release-moments": ("release-moments", "run"),
    "train": ("train", "run"),
    "sample": ("sample", "run", "-n", "20"),
    "complete-wavelet": ("complete-wavelet", "run"),
    "guide": ("guide", "run", "--start", "0.3", "-n", "20"),
    "report": ("report", "run"),
    "status": ("status", "run"),
    "replay": ("replay", "run"),
    "replay of the hand-out": ("replay", "run/released"),
}
OPENERS = {
    "check": {"train-images", "train-labels", "test.npz"},
    "release-moments": {"train-images", "train-labels"},
    "train": {"train-images", "train-labels"},
}
TRAIN_ONLY = ("release-moments", "train")


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> tuple[Path, dict[str, Watched]]:
    root = tmp_path_factory.mktemp("watched")
    write_private(root / "private")
    (root / "plan.yaml").write_text(PLAN.format(private=root / "private"))
    return root, {name: watch(root, *arguments) for name, arguments in COMMANDS.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_whole_chain_runs(command, chain):
    watched = chain[1][command]
    assert watched.code == 0, watched.said


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in OPENERS])
def test_no_private_path_is_opened(command, chain):
    assert chain[1][command].opened == []


@pytest.mark.parametrize("command", OPENERS)
def test_a_command_that_opens_private_files_is_caught(command, chain):
    assert set(chain[1][command].opened) >= OPENERS[command]


@pytest.mark.parametrize("command", TRAIN_ONLY)
def test_spending_reads_no_held_out_record(command, chain):
    assert "test.npz" not in chain[1][command].opened


def test_private_paths_stay_in_the_curator_room(chain):
    root, _ = chain
    files = [path for path in (root / "run").rglob("*") if path.is_file()]
    assert any(path.is_relative_to(root / "run" / "released") for path in files)
    spelled = os.fsencode(root / "private")
    leaking = [
        path.relative_to(root).as_posix()
        for path in files
        if not path.is_relative_to(root / "run" / "curator") and spelled in path.read_bytes()
    ]
    assert leaking == []
