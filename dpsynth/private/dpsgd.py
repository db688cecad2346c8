"""DP-SGD on the rectified flow (StraightDP, section 3.2), charged a chunk of steps at a time.

Each step is one Poisson-subsampled Gaussian mechanism: coins at the declared rate, clipped
sum, noise once, divisor the declared q N. See docs/maths/dpsgd.md.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.settled import MODEL
from dpsynth.artifacts.spending import Spender, calibration_hash, spending
from dpsynth.artifacts.trained import checkpoint_path, start_path
from dpsynth.console import progress
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import BudgetError, MissingError, PlanError
from dpsynth.models.velocity import describe, load_for, save_velocity, train_last
from dpsynth.planning.schema import Train
from dpsynth.planning.verify import VerifiedPlan, require_allocated
from dpsynth.private.encoding import UnitCodes, private_stream
from dpsynth.private.engine import DEFAULT, GRID, EngineSettings, PerExampleClipper
from dpsynth.private.lattice import CODE_MAX
from dpsynth.private.optimisers import gradient_noise
from dpsynth.private.steps import PrivateCodes, Workload, append_log, flow_losses, run_chunk
from dpsynth.private.together import own_noise, require_same_codes, require_small_rounding
from dpsynth.private.training_state import TrainingState
from dpsynth.public.representation import Representation, load_representation
from dpsynth.vault.checked import require_checked


def train(
    verified: VerifiedPlan, ranks: Ranks = ALONE, engine: EngineSettings = DEFAULT
) -> dict[str, Any]:
    """Spend the plan's free training slots; write `released/model.safetensors`.

    Closes the transcript where no other stage comes after.

    Starts from the distilled model if the plan distils, else from the public prior, and resumes
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
        require_same_codes(training.representation, ranks)
        training.agree()
        _train_chunks(training, spender)
        ranks.tell({})
        state, low = training.state, training.work.low
        averaged = state.averaged()
        save_velocity(averaged, run.released / MODEL, plan.velocity, room="released", low=repr(low))
        if verified.lock.last_stage == "train":
            spender.close()
    return {"released": MODEL, "steps": state.step, "from_time": low}


def _follow(verified: VerifiedPlan, settings: Train, ranks: Ranks, engine: EngineSettings) -> None:
    """Take every chunk that the main process tells of, which it does once the charge is on disk."""
    told = ranks.tell(None)["settled"]
    slots = verified.lock.slots
    last = slots[told - 1] if told else None
    training = _Training.resumed(verified, settings, last, ranks, engine)
    require_same_codes(training.representation, ranks)
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
            hint="dpsynth sample RUN   (without a model: dpsynth sample RUN --model release)",
        )
    moments = {slot.id for slot in lock.stage_slots("moments")}
    if moments and not moments & spender.state.settled and moments - spender.state.charged:
        raise MissingError("the moments come first", hint="dpsynth release-moments RUN")


def _start(verified: VerifiedPlan, settings: Train) -> tuple[nn.Module, float]:
    """Start weights, and the time from which training goes on (tau; 0 without distillation)."""
    plan, run = verified.plan, verified.run
    path = start_path(run, verified.lock)
    if not path.exists():
        step = "pretrain" if plan.distillation is None else "train"  # which distils first
        raise MissingError(f"{path.name} is missing", hint=f"dpsynth {step} {run.root}")
    model, facts = load_for(path, plan)
    if settings.parameters == "last":
        train_last(model)
    low = float(facts.get("train_from", 0.0))
    _require_edge(verified.lock, low)
    return model, low


def _require_edge(lock: Lock, low: float) -> None:
    """The time buckets that clips were chosen for begin where training does."""
    edges = (lock.allocation or {}).get("edges")
    if edges is not None and edges[0] != low:
        raise PlanError(
            f"training goes on from t = {low:g}, and the lock's time buckets begin at {edges[0]:g}",
            hint="the start weights are of another plan: plan a new run (its budget adds up)",
        )


@dataclass
class _Training:
    """What one process trains with: a copy of the state, and its shard, read after a charge."""

    verified: VerifiedPlan
    ranks: Ranks
    representation: Representation
    state: TrainingState
    work: Workload
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
        plan = verified.plan
        representation = load_representation(verified.run, plan)
        model, low = _start(verified, settings)
        noise = gradient_noise(verified.lock.stage_slots("train"), plan.private.capacity)
        state = TrainingState(model, settings, noise)
        if settled is not None:
            state.load(checkpoint_path(verified.run, settled))
        require_small_rounding(ranks, sum(p.numel() for p in model.parameters()), GRID)
        work = Workload(settings, plan.private.capacity, plan.private.conditions, low)
        return cls(verified, ranks, representation, state, work, engine)

    def clipper(self) -> PerExampleClipper:
        """The engine on this model; a context manager."""
        clip = self.work.settings.clip
        return PerExampleClipper(self.state.model, flow_losses, clip, settings=self.engine)

    def _describe(self, data: PrivateCodes) -> None:
        """Let a label mean its record's free caption: in memory alone, in no file of the model."""
        if data.captions is not None:
            describe(self.state.model, data.captions)
            self.work = replace(self.work, classes=len(data.captions))

    def agree(self) -> None:
        """Refuse to go on unless every process holds the same bits."""
        if self.ranks.world > 1:
            self.ranks.require_same("the state of training", self.state.digest())

    def chunk(
        self, slot: Slot, clipper: PerExampleClipper, advance: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Take the steps of a slot whose charge is on disk; lines for the curator."""
        if self.data is None:
            self.data = load_codes(self.verified, self.representation, self.ranks)
            self._describe(self.data)
        noise = own_noise(self.verified.lock, slot.name, self.ranks)
        log = run_chunk(
            slot,
            self.data,
            self.work,
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


def load_codes(
    verified: VerifiedPlan, representation: Representation, ranks: Ranks = ALONE
) -> PrivateCodes:
    """The private codes of a shard on the clip's grid, in memory. Call after a charge."""
    return codes_in(private_stream(verified, representation, ranks), representation)


def codes_in(chunks: Iterable[UnitCodes], representation: Representation) -> PrivateCodes:
    """The codes of these chunks on the clip's grid, as training takes them."""
    step = representation.radius / CODE_MAX
    codes, labels, sizes = [], [], []
    captions: tuple[str, ...] | None = None
    for chunk in chunks:
        codes.append(torch.from_numpy(chunk.codes * step).float())
        labels.append(torch.from_numpy(chunk.labels))
        if chunk.sizes is not None:
            sizes.append(torch.from_numpy(chunk.sizes))
        if chunk.captions is not None:
            captions = (*(captions or ()), *chunk.captions)
    found = torch.cat(labels) if captions is None else torch.arange(len(captions))
    return PrivateCodes(torch.cat(codes), found, torch.cat(sizes) if sizes else None, captions)
