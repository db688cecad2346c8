"""DP-SGD on a plan's task, charged a chunk of steps at a time.

The task is the rectified flow (StraightDP, section 3.2) or spectral tokens (DP-Wavelet, section 3).
Each step is one Poisson-subsampled Gaussian mechanism: coins at the declared rate, clipped sum,
noise once, divisor the declared q N. See docs/maths/dpsgd.md.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.settled import MODEL
from dpsynth.artifacts.spending import Spender, calibration_hash, spending
from dpsynth.artifacts.trained import checkpoint_path
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import BudgetError, MissingError, PlanError
from dpsynth.planning.training import Train
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.private.encoding import private_stream
from dpsynth.private.engine import DEFAULT, GRID, EngineSettings, PerExampleClipper
from dpsynth.private.optimisers import gradient_noise
from dpsynth.private.steps import PrivateCodes, append_log, run_chunk
from dpsynth.private.task import Task
from dpsynth.private.tasks import load_task
from dpsynth.private.together import own_noise, require_same_codes, require_small_rounding
from dpsynth.private.training_state import TrainingState
from dpsynth.vault.checked import require_checked


def train(
    verified: VerifiedPlan, ranks: Ranks = ALONE, engine: EngineSettings = DEFAULT
) -> dict[str, Any]:
    """Spend the plan's free training slots; write `released/model.safetensors`.

    Closes the transcript where no other stage comes after.

    Starts from the distilled model if the plan distils, else from the public one, and resumes
    after the last settled chunk; a chunk that a crash forfeited is skipped and stays spent.

    Every process of `ranks` calls this. The main one spends, writes and returns what was made; the
    others give their part of every step and return {}. `engine`: speed settings of the clipping.

    Raises:
        PlanError: the plan has no train stage, or must be planned again after `pretrain`.
        BudgetError: training is over and closed.
        MissingError: an earlier step has not run.
    """
    plan, run = verified.plan, verified.run
    settings = plan.stages.train
    if settings is None:
        raise PlanError("this plan has no train stage", hint="declare stages.train and re-plan")
    if not ranks.is_main:
        _follow(verified, settings, ranks, engine)
        return {}
    require_checked(verified)
    require_allocated(verified)
    with _spending(verified) as spender:
        _check_order(spender, verified.lock)
        planned = verified.lock.stage_slots("train")
        settled = [slot for slot in planned if slot.id in spender.state.settled]
        last = settled[-1] if settled else None
        training = _Training.resumed(verified, settings, last, ranks, engine)
        ranks.tell({"settled": last.id if last else 0})
        require_same_codes(training.task.space, ranks)
        training.agree()
        _train_chunks(training, spender)
        ranks.tell({})
        state, task = training.state, training.task
        task.save(state.averaged(), run.released / MODEL)
        if verified.lock.last_stage == "train":
            spender.close()
    return {"released": MODEL, "steps": state.step, **task.report()}


def _follow(verified: VerifiedPlan, settings: Train, ranks: Ranks, engine: EngineSettings) -> None:
    """Take every chunk that the main process tells of, which it does once the charge is on disk."""
    told = ranks.tell(None)["settled"]
    slots = verified.lock.slots
    last = slots[told - 1] if told else None
    training = _Training.resumed(verified, settings, last, ranks, engine)
    require_same_codes(training.task.space, ranks)
    training.agree()
    with training.clipper() as clipper:
        while told := ranks.tell(None):
            training.chunk(slots[told["charged"] - 1], clipper)


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
            "this run is closed: nothing more may be spent on training",
            hint="dpsynth sample RUN   (without a model: dpsynth sample RUN --model "
            f"{'release' if lock.stage_slots('moments') else 'prior'})",
        )
    for stage, said, command in (
        ("moments", "the moments come first", "release-moments"),
        ("central", "the central images come first", "release-central"),
    ):
        slots = {slot.id for slot in lock.stage_slots(stage)}
        if slots and not slots & spender.state.settled and slots - spender.state.charged:
            raise MissingError(said, hint=f"dpsynth {command} RUN")


@dataclass
class _Training:
    """What one process trains with: a copy of the state, and its shard, read after a charge."""

    verified: VerifiedPlan
    ranks: Ranks
    task: Task
    state: TrainingState
    clip: float
    engine: EngineSettings
    data: PrivateCodes | None = None

    @classmethod
    def resumed(
        cls,
        verified: VerifiedPlan,
        settings: Train,
        settled: Slot | None,
        ranks: Ranks,
        engine: EngineSettings,
    ) -> "_Training":
        """Start weights, or what the chunk that settled last has left."""
        plan, lock = verified.plan, verified.lock
        task = load_task(verified.run, plan, lock)
        noise = gradient_noise(lock.stage_slots("train"), plan.private.capacity)
        state = TrainingState(task.model, settings, noise, task.facts)
        if settled is not None:
            state.load(checkpoint_path(verified.run, settled))
        weights = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
        require_small_rounding(ranks, weights, GRID)
        return cls(verified, ranks, task, state, settings.clip, engine)

    def clipper(self) -> PerExampleClipper:
        """The engine on this model; a context manager."""
        task = self.task
        return PerExampleClipper(task.model, task.losses, self.clip, settings=self.engine)

    def agree(self) -> None:
        """Refuse to go on unless every process holds the same bits."""
        if self.ranks.world > 1:
            self.ranks.require_same("the state of training", self.state.digest())

    def chunk(
        self, slot: Slot, clipper: PerExampleClipper, advance: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Take the steps of a slot whose charge is on disk; lines for the curator."""
        if self.data is None:
            stream = private_stream(self.verified, self.task.space, self.ranks)
            self.data = self.task.take(stream)
        noise = own_noise(self.verified.lock, slot.name, self.ranks)
        log = run_chunk(
            slot,
            self.data,
            self.task.work,
            self.state,
            clipper=clipper,
            noise=noise,
            advance=advance,
            ranks=self.ranks,
        )
        self.agree()
        return log


def _train_chunks(training: _Training, spender: Spender) -> None:
    """The main process's part: charge, take the steps with all others, settle, slot by slot."""
    free, run, state = spender.free_slots("train"), training.verified.run, training.state
    before: Slot | None = None
    with (
        training.clipper() as clipper,
        progress("private training", sum(slot.steps or 0 for slot in free)) as bar,
    ):
        if free and (batch := training.task.trial()) is not None:
            clipper.clipped_sum(*batch)  # what the engine refuses, it refuses before a charge
        for slot in free:
            spender.charge(slot)
            training.ranks.tell({"charged": slot.id})  # only now: the charge is on disk
            log = training.chunk(slot, clipper, bar.advance)
            reach("mechanism:done")
            path = checkpoint_path(run, slot)
            reach("checkpoint:before")
            state.save(path)
            reach("checkpoint:written")
            spender.settle(slot, path)
            append_log(run.curator / "training.jsonl", log)
            if before is not None:
                checkpoint_path(run, before).unlink(missing_ok=True)
            before = slot
