"""Runs of the table in a work folder, made where they are missing.

By the functions behind `dpsynth plan`, pretrain, check, release-moments, replay, guide and sample,
in one process, so that torch is loaded once. The prior, and the public room with its own samples,
are made once. A run that spends has fresh noise; what it draws is moved to `drawn/`, measured, and
kept as a score.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.frozen import autoencoder, gap, things, transformer
from benchmarks.frozen.plans import MEANS, plan_of
from benchmarks.frozen.sizes import SIZES, Size
from benchmarks.frozen.transformer import few_tokens
from benchmarks.wavelet.runs import require_same

PRIVATE, STAND_IN = "warm", "cool"


class Runs:
    """The runs of one size in a work folder."""

    def __init__(self, work: Path, size: str = "compact") -> None:
        self.work, self.size = work, SIZES[size]
        self._judges: dict[str, gap.Judge] = {}
        torch.set_num_threads(1)

    @property
    def prior(self) -> Path:
        """The checkpoint, trained where it is missing."""
        return transformer.train(self.work / "prior", self.size)

    def plan(self, name: str, style: str, size: Size | None = None) -> Path:
        """A plan file over the private set of a style."""
        size = size or self.size
        images, labels = things.private_set(style, size.records, size.side)
        folder = things.write_folder(self.work / style, images, labels)
        held_out = things.write_folder(self.work / f"{style}-held-out", *self.held_out(style))
        path = self.work / "jobs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        plan = plan_of(self.prior, folder, held_out, size)
        path.write_text(json.dumps(plan, indent=1))  # JSON is YAML
        return path

    def held_out(self, style: str) -> tuple[things.Images, things.Labels]:
        """As many other images of a style as each mean has samples."""
        size = self.size
        return things.private_set(style, size.drawn, size.side, after=size.records)

    def room(self) -> Path:
        """A planned run with the public room, which nothing private ever enters."""
        return self.pretrained("room", self.size)

    def pretrained(self, name: str, size: Size) -> Path:
        """A planned run of this size whose public stages are made."""
        from dpsynth.planning.verify import make_run
        from dpsynth.public.pretrain import pretrain

        run, plan = self.work / "runs" / name, self.plan(name, PRIVATE, size)
        require_same(plan, run)
        if not (run / "done").exists():
            with few_tokens():
                pretrain(make_run(plan, run))
            (run / "done").touch()
        return run

    def released(self, style: str, number: int) -> Path:
        """A run of a style, by number, that has spent its epsilon and was replayed."""
        return self.spent(f"{style}-{number}", style, self.room(), self.size)

    def spent(self, name: str, style: str, room: Path, size: Size) -> Path:
        """A run over a room's public stages that has released its moments, and was replayed."""
        from dpsynth.assess.check import ensure_checked
        from dpsynth.planning.replay import replay
        from dpsynth.planning.verify import load_verified, make_run
        from dpsynth.private.moments import release_moments

        run, plan = self.work / "runs" / name, self.plan(name, style, size)
        require_same(plan, run)
        if not (run / "done").exists():
            if not (run / "transcript.jsonl").exists():
                make_run(plan, run)
                shutil.copytree(room / "public", run / "public", dirs_exist_ok=True)
            verified = load_verified(run)
            ensure_checked(verified)
            release_moments(verified)
            (run / "done").write_text(f"epsilon {replay(run).epsilon:g}\n")
        return run

    def guided(self, style: str, number: int, sigma: float, mean: str) -> dict[str, float]:
        """The score of guided samples, drawn where it is missing."""
        name = f"{style}-{number}-{mean}-{sigma:g}"
        return self.score(name, style, lambda: self.draw(style, number, sigma, mean))

    def unguided(self, style: str) -> dict[str, float]:
        """The score of the frozen prior's own samples: the floor, 0 but for chance."""
        return self.score(f"{style}-prior", style, lambda: reference(self.room(), "pretrained"))

    def exact(self, style: str, number: int) -> dict[str, float]:
        """The score of samples that are guided by moments without noise, from the plan's start."""
        run = self.released(style, number)
        return self.score(f"{style}-{number}-exact", style, lambda: reference(run, "nonprivate"))

    def score(self, name: str, style: str, draw: Any) -> dict[str, float]:
        """A kept score, or that of the folder that `draw` gives, which is kept as `drawn/NAME`."""
        path = self.work / "scores" / f"{name}.json"
        if not path.exists():
            folder = self.work / "drawn" / name
            if not folder.exists():
                folder.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(draw(), folder)
            found = self.judge(style).score(*gap.samples_in(folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1))
            part.rename(path)
            print(f"{name}: {rounded(found)}", file=sys.stderr, flush=True)
        kept: dict[str, float] = json.loads(path.read_text())
        return kept

    def draw(self, style: str, number: int, sigma: float, mean: str) -> Path:
        """A folder of guided samples, by the function behind `dpsynth guide`."""
        from dpsynth.planning.verify import load_verified
        from dpsynth.released.guidance import Guide
        from dpsynth.released.guide import guide

        if mean not in MEANS:
            raise SystemExit(f"there is no mean {mean!r}")
        verified = load_verified(self.released(style, number))
        with few_tokens():
            facts = guide(verified, None, Guide(round(1 - sigma, 6), mean))
        return Path(facts["samples"])

    def judge(self, style: str) -> gap.Judge:
        """What samples of a style are held against; p is the mean of the room's own samples."""
        if style not in self._judges:
            own, _ = gap.samples_in(self.room() / "public" / "own-samples")
            private, _ = things.private_set(style, self.size.records, self.size.side)
            vae = autoencoder.train(self.work / "prior-vae", self.size)
            known = next(iter(self._judges.values()), None)
            probe = known.probe if known else gap.probe_of(self.size)
            self._judges[style] = gap.Judge.of(vae, own, private, probe)
        return self._judges[style]

    def ceiling(self, style: str) -> dict[str, float]:
        """The score of held-out private images in the samples' place."""
        return self.judge(style).score(*self.held_out(style))


def reference(run: Path, kind: Any) -> Path:
    """A folder of `dpsynth reference`."""
    from dpsynth.assess.nonprivate.making import reference as draw
    from dpsynth.planning.verify import load_verified

    with few_tokens():
        return Path(draw(load_verified(run), kind)["where"])


def rounded(found: dict[str, float]) -> dict[str, float]:
    """For people."""
    return {name: round(value, 3) for name, value in found.items()}
