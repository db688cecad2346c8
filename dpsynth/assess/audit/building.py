"""Building the worlds of an audit: the plan as it is, its faults at epsilon 1, and references."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.audit.canaries import canary_codes, fair_coins
from dpsynth.assess.audit.chain import Bench, draw_of, mixture_of, samples_of, start_of
from dpsynth.assess.audit.controls import copied, faulty_source, unclipped
from dpsynth.assess.audit.records import Records
from dpsynth.assess.audit.rounds import Population, ReleasedRounds, real_codes, release_rounds
from dpsynth.assess.audit.training import Advance, Hooks, Trained, train_gradients, train_records
from dpsynth.assess.audit.worlds import (
    CONTROL_EPSILON,
    CONTROLS,
    Canaries,
    Control,
    Kind,
    Mask,
    Observed,
    Pair,
    World,
)
from dpsynth.planning.allocation import Profile
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import verify
from dpsynth.private.captioned import load_captioned
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.noise import NoiseSource
from dpsynth.public.projection import load_release_space, projection_of
from dpsynth.public.representation import Representation, load_representation


@dataclass(frozen=True)
class Spec:
    """A world to build: its name, its fault if any, its kind, and the plan with its own lock.

    reference: a model for likelihood ratios, which no attack is aimed at.
    """

    name: str
    control: Control | None
    kind: Kind
    plan: Plan
    lock: Lock
    reference: bool = False

    @property
    def steps(self) -> int:
        """Steps of private training that it takes."""
        train = self.plan.stages.train
        return train.steps if train is not None and self.has_steps else 0

    @property
    def has_moments(self) -> bool:
        """Whether it carries out the moments stage: a fault of private steps is seen without."""
        faulty_steps = self.kind == "gradients" and self.control is not None
        return self.plan.stages.moments is not None and not faulty_steps

    @property
    def has_steps(self) -> bool:
        """Whether it trains: a fault of moments, and copies in what they yield, show without."""
        return self.kind == "gradients" or self.control is None or not self.has_moments

    @property
    def has_samples(self) -> bool:
        """Whether it shows what the plan hands out: not beside gradients, which show more."""
        return self.kind == "records" and self.control in {None, "copied-record"}


def specs(plan: Plan, lock: Lock, profile: Profile | None, references: int = 0) -> tuple[Spec, ...]:
    """All worlds in order: the plan's own, references, then each control at epsilon 1.

    A plan with private steps has a world of its own for the adversary who sees gradients. A fault
    of a mechanism is planted in each stage by itself, so that each stage's attacks must see it.
    Noise is the system's in all of them, also under an unsafe lock.

    Raises:
        PlanError: no noise meets epsilon 1 for this plan.
    """
    stages = plan.stages
    own = replace(lock, unsafe_seed=None, lock_hash="")
    made = [Spec("plan", None, "records", plan, own)]
    if stages.train is not None:
        made.append(Spec("plan-gradients", None, "gradients", plan, own))
    made += [
        Spec(f"reference-{number}", None, "records", plan, own, reference=True)
        for number in range(1, references + 1)
    ]
    budget = plan.budget.model_copy(update={"epsilon": CONTROL_EPSILON})
    narrow = plan.model_copy(update={"budget": budget})
    weak = verify(narrow, profile=profile)
    for control in CONTROLS:
        if control == "copied-record":
            made.append(Spec(control, control, "records", narrow, weak))
            continue
        if stages.moments is not None:
            made.append(Spec(f"{control}-moments", control, "records", narrow, weak))
        if stages.train is not None:
            made.append(Spec(f"{control}-gradients", control, "gradients", narrow, weak))
    return tuple(made)


class Builder:
    """Builds the worlds of an audit: the same records and canaries, and coins of each one's own."""

    def __init__(self, run: RunDir, records: Records, canaries: Pair, samples: int) -> None:
        """Read the public room; the records are read when the first world is built.

        Args:
            run: its public room is read, and nothing is written to it.
            records: who is trained on.
            canaries: see `canaries.draw_canaries`.
            samples: how many images a world shows at most.
        """
        plan = records.plan
        self._run, self._records, self._canaries = run, records, canaries
        self._samples = min(samples, plan.sampling.count)
        self.representation = load_representation(run, plan)
        self._space = load_release_space(run, plan).representation
        self._stream = records.stream(self._space)
        self._captioned = load_captioned(run, plan, self._space)
        self._training = self._stream
        if projection_of(plan) is not None:
            self._training = records.stream(self.representation)

    def build(
        self, spec: Spec, charge: Callable[[Slot], None], advance: Advance
    ) -> tuple[Canaries, Observed]:
        """Toss fresh coins, and carry the plan out with the canaries that they include.

        Args:
            spec: which world.
            charge: called with every slot before its mechanism reads a record.
            advance: called after every step of private training.
        """
        included = fair_coins(len(self._canaries[1]))
        bench = Bench(self._run, spec.plan, spec.lock, self.representation)
        fixed = faulty_source(spec.control)

        def source(name: str) -> NoiseSource:
            return fixed or NoiseSource.for_run(spec.lock, name)

        released = None
        if spec.has_moments:
            who = self._population(included, spec.control)
            released = release_rounds(
                spec.plan,
                spec.lock,
                self._space.radius,
                who,
                source=source,
                charge=charge,
                captioned=self._captioned,
            )
        trained = self._trained(bench, spec, released, included, Hooks(source, charge, advance))
        images, labels = self._canaries
        codes = real_codes(self._coded(self.representation), self.representation.radius)
        return Canaries(images, labels, codes, included), Observed(
            moments=None if released is None else released.statistics,
            gradients=None if trained is None else trained.gradients,
            model=None if trained is None or spec.kind == "gradients" else trained.model,
            low=0.0 if trained is None else trained.low,
            samples=self._sampled(bench, spec, released, trained, included),
        )

    def _trained(
        self,
        bench: Bench,
        spec: Spec,
        released: ReleasedRounds | None,
        included: Mask,
        hooks: Hooks,
    ) -> Trained | None:
        """The world's model: by private steps, else as distilled; None where there is none."""
        if spec.kind == "gradients":
            chunks = self._training.chunks()
            return train_gradients(bench, chunks, included, control=spec.control, hooks=hooks)
        if not spec.has_steps:
            return None
        mixture = None if released is None else mixture_of(bench, released)
        if spec.plan.stages.train is not None:
            start = start_of(bench, mixture)
            own = self._coded(self.representation)
            who = Population(self._training.chunks, own, included, self._records.several)
            return train_records(bench, start, who.everyone(), hooks=hooks)
        if spec.plan.distillation is not None:
            return Trained(start_of(bench, mixture), 0.0)
        return None

    def _sampled(
        self,
        bench: Bench,
        spec: Spec,
        released: ReleasedRounds | None,
        trained: Trained | None,
        included: Mask,
    ) -> Pair | None:
        """What the world would hand out; a copied record lies among draws of the release alone."""
        if spec.reference or not spec.has_samples:
            return None
        mixture = None if released is None else mixture_of(bench, released)
        model = None if trained is None else trained.model
        samples = samples_of(bench, draw_of(bench, mixture, model), self._samples)
        if spec.control != "copied-record":
            return samples
        return copied(samples, self._canaries, included)

    def _population(self, included: Mask, control: Control | None) -> Population:
        units = self._coded(self._space)
        own = unclipped(units) if control == "no-clip" else units
        return Population(self._stream.chunks, own, included, self._records.several)

    def _coded(self, space: Representation) -> UnitCodes:
        images, labels = self._canaries
        return canary_codes(space, images, labels, self._records.plan.private.conditions)


def world_of(spec: Spec, canaries: Canaries, observed: Observed, radius: float) -> World:
    """A built world as attacks are shown it, without references."""
    return World(
        name=spec.name,
        control=spec.control,
        kind=spec.kind,
        plan=spec.plan,
        epsilon=spec.lock.epsilon,
        delta=float(spec.lock.budget["delta"]),
        radius=radius,
        canaries=canaries,
        observed=observed,
        slots=spec.lock.slots,
    )
