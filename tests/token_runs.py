"""A tiny run on spectral tokens: digits are private, letters public, trained in a second or two.

8 x 8 images, one level: 4 private tokens of LL (4 x 4, patches of 2), then 12 of details. With
`levels=0` 16 tokens in raster order, all of them private.
"""

import functools
import shutil
import tempfile
from pathlib import Path

from clikit import DIGITS

from dpsynth.artifacts.rooms import RunDir
from dpsynth.planning.verify import VerifiedPlan, load_verified, make_run
from dpsynth.public.pretrain import pretrain

TEXT = """\
version: 1
name: tiny-tokens
budget: {{epsilon: 8.0, delta: 1e-4}}
{private}
public: [{{kind: letters, count: {letters}}}]
representation: {representation}
tokens:
  levels: {levels}
  private: {j0}
  tokenizer: {{patches: {patches}, hidden: 16, depth: 1, heads: 2, codebook: 16, code: 4,
    steps: 40, batch: 32, learning_rate: 3e-3}}
  transformer: {{width: 16, depth: 1, heads: 2, text: {{width: 8, length: 2}}}}
stages: {stages}
prior: {{steps: 40, batch: 32, learning_rate: 3e-3}}
sampling: {sampling}
{more}
"""
TRAIN = "{train: {rate: 0.1, steps: 4, chunk: 2, clip: 1.0, parameters: all}}"
SAMPLING = "{method: tokens, count: 20, guidance: 1.0}"
FLOW = {
    "representation": "{kind: pca, code: 6}",
    "stages": "{moments: {}}",
    "sampling": "{method: release, count: 20}",
    "more": "velocity: {kind: mlp, width: 16, depth: 1}",
}
"""Changes that make a plan of another kind of it, with tokens for completion."""


def token_plan(
    folder: Path,
    *,
    levels: int = 1,
    j0: int = 0,
    patches: str | None = None,
    private: str = DIGITS,
    letters: int = 200,
    representation: str = "{kind: tokens}",
    stages: str = TRAIN,
    sampling: str = SAMPLING,
    more: str = "",
) -> Path:
    """Write the plan file; keys are parts of `TEXT`."""
    sides = patches or str([2] * (levels + 1))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.yaml"
    path.write_text(
        TEXT.format(
            private=private,
            letters=letters,
            representation=representation,
            levels=levels,
            j0=j0,
            patches=sides,
            stages=stages,
            sampling=sampling,
            more=more,
        )
    )
    return path


def planned(folder: Path, **changes) -> VerifiedPlan:
    """A planned run in `folder`/run, nothing pretrained; `changes` as `token_plan` takes them."""
    return make_run(token_plan(folder, **changes), folder / "run")


def pretrained(folder: Path, **changes) -> VerifiedPlan:
    """A planned run in `folder`/run after `pretrain`.

    The public room is made once in a process, and copied: `pretrain` then finds all there.
    """
    verified = planned(folder, **changes)
    learned = "representation" not in changes
    unseen = {"stages", "sampling"} if learned else set()  # they decide nothing public here
    key = sorted((name, value) for name, value in changes.items() if name not in unseen)
    made = RunDir(_made(tuple(key)))
    for path in made.public.iterdir():
        shutil.copy2(path, verified.run.public / path.name)
    return load_verified(verified.run.root)


@functools.cache
def _made(changes: tuple[tuple[str, object], ...]) -> Path:
    verified = planned(Path(tempfile.mkdtemp(prefix="dpsynth-tokens-")), **dict(changes))
    pretrain(verified)
    return verified.run.root
