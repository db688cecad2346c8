"""The rectified flow as a task of private training (StraightDP, section 3.2)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.adapter import ADAPTER, adapter_facts, write_adapter
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.trained import start_path
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import MissingError, PlanError, UsageError
from dpsynth.models.frozen.machine import machine, on_device
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.models.trainable import train_only
from dpsynth.models.velocity import describe, load_for, save_velocity
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.encoding import UnitCodes, private_stream
from dpsynth.private.lattice import CODE_MAX
from dpsynth.private.steps import PrivateCodes, Workload, collected, flow_losses
from dpsynth.public.representation import Representation, load_representation


@dataclass
class FlowTask:
    """See `task.Task`."""

    plan: Plan
    space: Representation
    model: nn.Module
    work: Workload

    losses = staticmethod(flow_losses)

    @classmethod
    def load(cls, run: RunDir, plan: Plan, lock: Lock) -> "FlowTask":
        """From the run's start weights: warm, distilled or the public prior (`start_path`).

        Raises:
            PlanError: no train stage, a start of other times than the lock's, or weights that this
                model does not have (`lora` is for a frozen prior).
            MissingError: an earlier step has not run.
            UsageError: a frozen prior in float16, see `_require_range`.
        """
        settings = plan.stages.train
        if settings is None:
            raise PlanError("this plan has no train stage", hint="declare stages.train and re-plan")
        _require_range(plan)
        space = load_representation(run, plan)
        path = start_path(run, lock)
        if not path.exists():
            # `train` distils, or learns central images, before private steps.
            public = plan.distillation is None and plan.stages.central is None
            step = "pretrain" if public else "train"
            raise MissingError(f"{path.name} is missing", hint=f"dpsynth {step} {run.root}")
        model, facts = load_for(path, plan)
        try:
            train_only(model, settings.parameters)
        except UsageError as error:
            raise PlanError(f"stages.train.parameters: {error}", hint=error.hint) from None
        _bring(model)
        low = float(facts.get("train_from", 0.0))
        require_edge(lock, low)
        work = Workload(settings, plan.private.capacity, plan.private.conditions, low)
        return cls(plan, space, model, work)

    @property
    def facts(self) -> dict[str, str]:
        """How factors beside a frozen prior are used; a flow says all by its weights."""
        frozen = self.plan.frozen
        if frozen is None:
            return {}
        lora = self.work.settings.lora
        return {ADAPTER: adapter_facts(lora.rank, lora.scale, frozen.hub_id, frozen.revision)}

    def take(self, chunks: Iterable[UnitCodes]) -> PrivateCodes:
        """Units' codes in memory; a label means its record's free caption, in no model's file."""
        data = codes_in(chunks, self.space)
        if data.captions is not None:
            describe(self.model, data.captions)
            self.work = replace(self.work, classes=len(data.captions))
        _bring(self.model)  # where parts take turns on a device, encoding had it last
        return data

    def trial(self) -> tuple[Tensor, ...] | None:
        """Two random codes of a frozen prior, whose layers others made; see `Task`."""
        if self.plan.frozen is None:
            return None
        draws = (2, self.work.settings.multiplicity, self.space.dim)
        codes, xi = torch.randn(draws[0], draws[-1]), torch.randn(draws)
        return codes, torch.arange(2) % self.work.classes, torch.rand(draws[:-1]), xi

    def save(self, model: nn.Module, path: Path) -> None:
        """Write the released model, with the time from which it was trained.

        Of a frozen prior that is its factors, and beside it the folder that others load them from.
        """
        low = repr(self.work.low)
        save_velocity(model, path, self.plan.velocity, room="released", low=low, **self.facts)
        if self.plan.frozen is not None:
            write_adapter(path)

    def report(self) -> dict[str, Any]:
        """The time from which training went on (tau; 0 without distillation)."""
        return {"from_time": self.work.low}


def _require_range(plan: Plan) -> None:
    """Refuse float16 before anything is charged: gradients fall below its least numbers.

    What is left of them hangs on the losses' scale, and the engine refuses that in its rehearsals.
    """
    if plan.frozen is not None and machine().dtype == "float16":
        raise UsageError(
            "--dtype float16 has too little range for gradients of a frozen prior",
            hint="--dtype bfloat16",
        )


def _bring(model: nn.Module) -> None:
    """A frozen model lies where it computes before its factors are counted, copied or tracked."""
    if isinstance(model, FrozenVelocity):
        on_device(model.transformer)


def require_edge(lock: Lock, low: float) -> None:
    """The time buckets that clips were chosen for begin where training does (PlanError)."""
    edges = (lock.allocation or {}).get("edges")
    if edges is not None and edges[0] != low:
        raise PlanError(
            f"training goes on from t = {low:g}, and the lock's time buckets begin at {edges[0]:g}",
            hint="the start weights are of another plan: plan a new run (its budget adds up)",
        )


def load_codes(
    verified: VerifiedPlan, representation: Representation, ranks: Ranks = ALONE
) -> PrivateCodes:
    """The private codes of a shard on the clip's grid, in memory. Call after a charge."""
    return codes_in(private_stream(verified, representation, ranks), representation)


def codes_in(chunks: Iterable[UnitCodes], representation: Representation) -> PrivateCodes:
    """The codes of these chunks on the clip's grid, as training takes them."""
    step = representation.radius / CODE_MAX
    return collected(chunks, lambda chunk: torch.from_numpy(chunk.codes * step).float())
