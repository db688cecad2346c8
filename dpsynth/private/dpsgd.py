"""DP-SGD on the rectified flow (StraightDP, section 3.2), charged a chunk of steps at a time.

Each step is one Poisson-subsampled Gaussian mechanism: coins at the declared rate, clipped
sum, noise once, divisor the declared q N. See docs/maths/dpsgd.md.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import Spender, calibration_hash, spending
from dpsynth.console import progress
from dpsynth.errors import BudgetError, MissingError, PlanError
from dpsynth.models.velocity import load_velocity, save_velocity
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.clipping import PerExampleClipper
from dpsynth.private.encoding import encode_private
from dpsynth.private.lattice import CODE_MAX
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, append_log, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState
from dpsynth.public.representation import Representation, load_representation
from dpsynth.released.distill import distilled_path
from dpsynth.vault.checked import require_checked

MODEL = "model.safetensors"


def train(verified: VerifiedPlan) -> dict[str, Any]:
    """Spend the plan's free training slots; write `released/model.safetensors`; close.

    Starts from the distilled model if the plan distils, else from the public prior, and resumes
    after the last settled chunk; a chunk that a crash forfeited is skipped and stays spent.

    Raises:
        PlanError: the plan has no train stage.
        BudgetError: training is over and closed.
        MissingError: an earlier step has not run.
    """
    plan, run = verified.plan, verified.run
    settings = plan.stages.train
    if settings is None:
        raise PlanError("this plan has no train stage", hint="declare stages.train and re-plan")
    require_checked(verified)
    with _spending(verified) as spender:
        _check_order(spender, verified.lock)
        representation = load_representation(run, plan)
        model, low = _start(verified, representation.dim)
        state = TrainingState(model, settings.learning_rate, settings.ema)
        _resume(verified, state, spender)
        work = Workload(settings, plan.private.capacity, len(plan.private.classes), low)
        _train_chunks(verified, spender, state, work, representation)
        averaged = state.averaged()
        save_velocity(averaged, run.released / MODEL, plan.velocity, room="released", low=repr(low))
        spender.close()
    return {"released": MODEL, "steps": state.step, "from_time": low}


def _spending(verified: VerifiedPlan) -> AbstractContextManager[Spender]:
    return spending(
        verified.run,
        verified.lock,
        calibration_hash=calibration_hash(verified.run),
        noise_source=verified.noise_source,
    )


def _check_order(spender: Spender, lock: Lock) -> None:
    if spender.state.closed:
        raise BudgetError(
            "this run is closed: its training budget is spent",
            hint="dpsynth sample RUN",
        )
    moments = {slot.id for slot in lock.stage_slots("moments")}
    if moments and not moments & spender.state.settled and moments - spender.state.charged:
        raise MissingError("the moments come first", hint="dpsynth release-moments RUN")


def _start(verified: VerifiedPlan, dim: int) -> tuple[nn.Module, float]:
    """Start weights, and the time from which training goes on (tau; 0 without distillation)."""
    plan, run = verified.plan, verified.run
    path = run.public / "prior.safetensors"
    if plan.distillation is not None:
        path = distilled_path(run)
    if not path.exists():
        step = "pretrain" if plan.distillation is None else "train"  # which distils first
        raise MissingError(f"{path.name} is missing", hint=f"dpsynth {step} {run.root}")
    model, facts = load_velocity(path, plan.velocity, dim, len(plan.private.classes))
    return model, float(facts.get("train_from", 0.0))


def _resume(verified: VerifiedPlan, state: TrainingState, spender: Spender) -> None:
    """Load what the last settled chunk left."""
    planned = verified.lock.stage_slots("train")
    settled = [slot for slot in planned if slot.id in spender.state.settled]
    if settled:
        state.load(checkpoint_path(verified.run, settled[-1]))


def _train_chunks(
    verified: VerifiedPlan,
    spender: Spender,
    state: TrainingState,
    work: Workload,
    representation: Representation,
) -> None:
    free = spender.free_slots("train")
    data: PrivateCodes | None = None
    before: Slot | None = None
    with (
        PerExampleClipper(state.model, flow_losses, work.settings.clip) as clipper,
        progress("private training", sum(slot.steps or 0 for slot in free)) as bar,
    ):
        for slot in free:
            spender.charge(slot)
            if data is None:  # only now: the charge is on disk
                data = load_codes(verified, representation)
            noise = NoiseSource.for_run(verified.lock, slot.name)
            log = run_chunk(
                slot, data, work, state, clipper=clipper, noise=noise, advance=bar.advance
            )
            reach("mechanism:done")
            path = checkpoint_path(verified.run, slot)
            reach("checkpoint:before")
            state.save(path)
            reach("checkpoint:written")
            spender.settle(slot, path)
            append_log(verified.run.curator / "training.jsonl", log)
            if before is not None:
                checkpoint_path(verified.run, before).unlink(missing_ok=True)
            before = slot


def load_codes(verified: VerifiedPlan, representation: Representation) -> PrivateCodes:
    """The private codes on the clip's grid, in memory. Call after a charge."""
    whole, labels = encode_private(verified, representation)
    step = representation.radius / CODE_MAX
    return PrivateCodes(torch.from_numpy(whole * step).float(), torch.from_numpy(labels))


def checkpoint_path(run: RunDir, slot: Slot) -> Path:
    """Where a chunk's checkpoint lies (curator's room)."""
    return run.curator / "checkpoints" / f"{slot.name}.safetensors"
