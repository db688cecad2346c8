"""What the stages of `pretrain` share: the plan, where to write, and the public images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsynth.artifacts.files import canonical_json, sha256_bytes
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import BudgetError
from dpsynth.planning.schema import Plan
from dpsynth.public.sources import PublicImages

if TYPE_CHECKING:
    from dpsynth.public.frozen_stage import FrozenStage

FORMAT = "dpsynth-calibration-1"
# Part of every recipe: raise it when the same settings give another result.
_VERSION = 1


@dataclass(frozen=True)
class Job:
    """One public room that is made; `frozen`: of a plan with a frozen prior."""

    plan: Plan
    run: RunDir
    public: PublicImages
    frozen: "FrozenStage | None" = None

    def recipe(self, stage: str, *parts: Any) -> str:
        """Hash of all that decides a stage's result."""
        image = self.plan.private.image.model_dump()
        sources = [facts.to_json() for facts in self.public.sources]
        whole = [_VERSION, stage, self.plan.public_seed, image, sources, *parts]
        return sha256_bytes(canonical_json({"recipe": whole}))

    def stale(self, path: Path) -> None:
        """Before a file is replaced: refuse when charges already name the calibration."""
        refuse_change(self.run, path.name)


def refuse_change(run: RunDir, name: str) -> None:
    """Refuse to replace something public of a run that has spent (BudgetError)."""
    if run.transcript.exists():
        raise BudgetError(
            f"{name} would change, but this run has spent with the calibration it has",
            hint="put back the files of public/ that it spent with (released/public/ may hold "
            "a copy); or start anew, with new budget: dpsynth plan PLAN --run runs/NEW",
        )
