"""How a plan's models learn: from public data, from a release, and from the records by DP-SGD."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dpsynth.planning.allocation import Allocation
from dpsynth.planning.frozen import KIND, FrozenPrior
from dpsynth.planning.optimizer import Adam, LowRank, Optimizer, Schedule
from dpsynth.planning.section import PositiveFloat, PositiveInt, Rate, Section, later, misfit


class Train(Section):
    """DP-SGD on the rectified flow over declared time buckets on [tau, 1] (section 3.2).

    Each step draws a Poisson batch at `rate`; `chunk` steps are charged at a time. `optimizer` and
    `schedule` say how the weights move along the noisy gradient (docs/training.md). On tokens the
    loss is their cross entropy: there are no times, so no buckets, and `multiplicity` counts the
    images of a unit that a step sees. `parameters`: which weights move, `attention` (and the
    reading of captions) as in DP-LDM, `lora` factors beside those of attention and MLPs. `times`:
    uniform in each bucket, or with a standard normal logit on (0, 1) (Esser et al. 2024, section
    3.1: most times in the middle, as Stable Diffusion 3 was trained).
    """

    weight: PositiveFloat = 1.0
    rate: Rate
    steps: PositiveInt
    chunk: PositiveInt = 100
    multiplicity: PositiveInt = 4
    clip: PositiveFloat = 1.0
    buckets: PositiveInt = 4
    learning_rate: PositiveFloat = 1e-3
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.99
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    optimizer: Optimizer = later(Adam())
    schedule: Schedule = later(Schedule())
    allocation: Allocation | None = later(None)
    parameters: Literal["all", "last", "attention", "lora"] = later("all")
    lora: LowRank = later(LowRank())
    times: Literal["uniform", "logit-normal"] = later("uniform")

    @model_validator(mode="after")
    def _chunks_hold_every_bucket(self) -> "Train":
        """A charge says how many steps it has, and so which clips: every chunk begins anew."""
        if self.allocation is not None and self.chunk % self.buckets and self.chunk < self.steps:
            raise misfit(
                f"stages.train.allocation needs chunks of whole rounds of its time buckets: chunk "
                f"is {self.chunk}, and buckets is {self.buckets}",
                "chunk",
                "buckets",
                "allocation",
                hint=f"write `chunk: {self.buckets * max(1, self.chunk // self.buckets)}`",
            )
        return self

    @model_validator(mode="after")
    def _times_fit(self) -> "Train":
        if self.times == "uniform":
            return self
        if self.allocation is not None:
            raise misfit(
                f"times: {self.times} draws from all of (0, 1), and an allocation gives each time "
                "bucket a clip of its own",
                "times",
                "allocation",
                hint="leave `allocation` out, or write `times: uniform`",
            )
        if self.buckets != 1:
            raise misfit(
                f"times: {self.times} draws from all of (0, 1), and buckets is {self.buckets}",
                "times",
                "buckets",
                hint="write `buckets: 1`",
            )
        return self

    @model_validator(mode="after")
    def _factors_are_used(self) -> "Train":
        if "lora" in self.model_fields_set and self.parameters != "lora":
            raise misfit(
                f"lora: only for `parameters: lora`, and parameters is {self.parameters}",
                "lora",
                hint="write `parameters: lora`, or leave `lora` out",
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> "Train":
        if self.schedule.warmup >= self.steps:
            raise misfit(
                f"schedule.warmup: {self.schedule.warmup} must end before the last step, and "
                f"steps is {self.steps}",
                "schedule.warmup",
            )
        return self


class Prior(Section):
    """Public pretraining of the velocity model (class-conditional rectified flow).

    `steps`: 0 leaves its weights new, for DP-SGD from scratch; a transformer of tokens has some.
    """

    steps: Annotated[int, Field(ge=0)] = 1_000
    batch: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.99
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1


def _kind_of(value: Any) -> str:
    """Which prior is meant: one with a `kind` is frozen, and a misspelt kind is named there."""
    own_keys = isinstance(value, Mapping) and {"kind", "model", "latent"} & value.keys()
    named = own_keys or isinstance(value, FrozenPrior)
    return KIND if named else _OWN


_OWN = "own"
PRIOR_TAGS = (_OWN, KIND)
"""What tells the two priors apart in pydantic's locations; no key of a plan."""
AnyPrior = Annotated[
    Annotated[Prior, Tag(_OWN)] | Annotated[FrozenPrior, Tag(KIND)], Discriminator(_kind_of)
]
"""A velocity model that is pretrained on public codes, or a frozen text-to-image model."""


class Distillation(Section):
    """Post-processing: teach the prior the released analytic field for t up to the horizon.

    `horizon: knee` takes tau of the public cosine-knee calibration, capped by `cap`.
    """

    steps: PositiveInt = 3_000
    batch: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3
    horizon: Literal["knee"] | Rate = "knee"
    cap: Rate = 1.0
