"""Small planned and pretrained runs on real digits, for tests of audits."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dpsynth.assess.check import check
from dpsynth.console import mute
from dpsynth.planning.verify import make_run
from dpsynth.public.pretrain import pretrain

PLAN = """\
version: 1
name: tiny
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {source}
  public: {public}
  capacity: 1800
  image: {{height: 8, width: 8}}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {{by: hash, fraction: 0.28, salt: tiny}}
public:
  - {{kind: letters, count: 400}}
representation: {{kind: pca, code: 8, clip_quantile: 0.8}}
stages:
{stages}
velocity: {{kind: mlp, width: 12, depth: 1}}
prior: {{steps: 4, batch: 32}}
{more}
"""
CELLS = """\
  moments:
    blocks: {count: 0.05, sum: 0.6, second: 0.35}
    cells: {most: 2, lloyd: 1, blocks: {count: 0.05, sum: 0.6, second: 0.35}}"""
SHARED = """\
  moments: {weight: 0.8, covariance: shared}"""
PAPER = """\
  moments: {covariance: shared, sensitivity: paper}"""
CAPTIONS = """\
  moments: {covariance: shared, captions: {features: one-hot}}"""
PAPER_CAPTIONS = """\
  moments: {covariance: shared, sensitivity: paper, captions: {features: one-hot}}"""
TRAIN = """\
  train: {weight: 0.2, rate: 0.5, steps: 12, chunk: 6, multiplicity: 1, buckets: 2}"""
RELEASE = "sampling: {method: release, count: 200}"
FLOW = """\
distillation: {steps: 4, batch: 32}
sampling: {method: flow, count: 200, steps: 3}"""


def planned(folder, stages, more, *, source="{kind: digits}", public="true"):
    """A run in `folder`, checked and pretrained."""
    plan = Path(folder) / "plan.yaml"
    plan.write_text(PLAN.format(stages=stages, more=more, source=source, public=public))
    with mute():
        verified = make_run(plan, Path(folder) / "runs" / "tiny")
        check(verified)
        pretrain(verified)
    return verified


_FOLDERS = []


@cache
def shared_run(stages, more):
    """One run for all tests that only read it."""
    folder = TemporaryDirectory(prefix="audit-")
    _FOLDERS.append(folder)  # removed when the tests end
    return planned(folder.name, stages, more)
