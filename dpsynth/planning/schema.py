"""The plan: what a custodian declares, as frozen values.

Everything that matters for privacy or for the result is here; paths that only say where
bytes lie are fields too, but never enter the plan's hash (`Plan.facts`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpsynth.errors import PlanError
from dpsynth.planning.caption_fits import require_captions
from dpsynth.planning.captions import Captions, Template
from dpsynth.planning.central import Central
from dpsynth.planning.code_space import require_code, with_code
from dpsynth.planning.embedding import Embedding
from dpsynth.planning.evolution import Evolution
from dpsynth.planning.facts import with_paths, without_paths
from dpsynth.planning.frozen import FrozenPrior
from dpsynth.planning.frozen_fits import require_frozen
from dpsynth.planning.methods import Method, require_method, with_method
from dpsynth.planning.sampling import Sampling
from dpsynth.planning.section import (
    Fraction,
    PositiveFloat,
    PositiveInt,
    Section,
    later,
    misfit,
)
from dpsynth.planning.source_kinds import PublicSource, Source
from dpsynth.planning.stages import Stages
from dpsynth.planning.token_fits import require_token_plan, with_token_numbers
from dpsynth.planning.tokens import Tokens
from dpsynth.planning.training import AnyPrior, Distillation, Prior
from dpsynth.planning.units import PrivacyUnit, UnitColumn, require_named, require_units
from dpsynth.planning.velocity import Velocity
from dpsynth.planning.wavelets import Canvas, Levels, require_wavelet


class Budget(Section):
    """What may be spent in total. `delta` above 1/(10 N) draws a warning.

    `unit`: what is added or removed. One record, or all records that share a value of a column.
    """

    epsilon: PositiveFloat
    delta: Fraction
    adjacency: Literal["add-or-remove-one"] = "add-or-remove-one"
    unit: PrivacyUnit = "record"

    @property
    def column(self) -> UnitColumn | None:
        """The column that names a record's unit; None where each record is its own."""
        return self.unit if isinstance(self.unit, UnitColumn) else None


class Cap(Section):
    """Limit on the sum of budgets of all runs on one private dataset (kept in its ledger)."""

    epsilon: PositiveFloat
    delta: Fraction


class ImageShape(Section):
    """Declared shape of every image; a record of another shape is invalid."""

    height: PositiveInt
    width: PositiveInt
    channels: Literal[1, 3] = 1


class HashHeldOut(Section):
    """Hold out each unit whose own salted hash falls below `fraction`.

    A record is hashed by its content; a unit of several by its name, so that it lies on one side.
    The rule looks at one unit alone, so that no unit moves another across the split.
    """

    by: Literal["hash"]
    fraction: Fraction
    salt: str = ""


class SourceHeldOut(Section):
    """Held-out records come from a source of their own (such as MNIST's test files)."""

    by: Literal["source"]
    source: Source


HeldOut = Annotated[HashHeldOut | SourceHeldOut, Field(discriminator="by")]


class Private(Section):
    """Public facts about the private records, and where they lie.

    `capacity` is the declared N, a number of privacy units: no denominator, rate or delta ever
    comes from the data.
    """

    source: Source
    capacity: PositiveInt
    image: ImageShape
    classes: Annotated[list[str], Field(min_length=1)]
    held_out: HeldOut
    public: bool = False
    cap: Cap | None = None
    captions: Captions | None = later(None)

    @property
    def conditions(self) -> int:
        """How many things a model of this plan may be asked for: classes, or fillings."""
        if isinstance(self.captions, Template):
            return self.captions.count(self.classes)
        return len(self.classes)

    @model_validator(mode="after")
    def _distinct_classes(self) -> "Private":
        if len(set(self.classes)) != len(self.classes):
            raise misfit("class names must be distinct", "classes")
        return self


class Autoencoder(Section):
    """Public training of the small convolutional autoencoder.

    `deform`: strength of the affine, elastic and thickness deformation under which images are
    seen; 0 leaves the coarser affine map of earlier plans. Above 0 `strokes` turns images of other
    sources than letters and glyphs into strokes first, and batches are half letters or glyphs.
    `hidden`: units between convolutions and code (8 `width` unless given). `norm`: batch
    normalisation and ReLU after every hidden layer. `loss`: of pixels. `perceptual`: weight of a
    loss in features of a classifier of the public images beside it. `precision`: of this training
    alone; records are always encoded in float32.
    """

    width: PositiveInt = 32
    epochs: PositiveInt = 8
    batch: PositiveInt = 256
    learning_rate: PositiveFloat = 2e-3
    latent_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    strokes: bool = True
    deform: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = later(0.0)
    hidden: PositiveInt | None = later(None)
    norm: bool = later(False)
    loss: Literal["cross-entropy", "squares"] = later("cross-entropy")
    precision: Literal["float32", "bfloat16"] = later("float32")
    perceptual: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = later(0.0)

    @model_validator(mode="after")
    def _batch_has_a_spread(self) -> "Autoencoder":
        if self.norm and self.batch < 2:
            raise misfit(
                "norm: true needs batch: 2 or more (a batch's own mean and spread)", "batch", "norm"
            )
        return self


class Representation(Section):
    """The public code space: PCA, an autoencoder, pixels, a wavelet's LL0 band, latents or tokens.

    Pixels and LL0 are centred and scaled by public ones, nothing more; their `code` follows from
    the image (of LL0: its sides, `padded` or rounded up, by 2^levels) and may be left out.
    `latent`: the latents of the frozen prior's VAE about their public mean, in its own units.
    `tokens`: those of the plan's section `tokens`; `code` is how many of them training sees.
    `clip_quantile`: the clip radius R is this quantile of the public codes' norms.
    """

    kind: Literal["pca", "autoencoder", "pixels", "wavelet", "latent", "tokens"]
    code: PositiveInt
    clip_quantile: Fraction = 0.99
    autoencoder: Autoencoder = Autoencoder()
    wavelet: str | None = later(None)
    levels: Levels | None = later(None)
    padded: Canvas | None = later(None)

    @model_validator(mode="after")
    def _wavelet_fits(self) -> "Representation":
        require_wavelet(self.kind, self.wavelet, self.levels, self.padded)
        return self


class Evaluation(Section):
    """The fixed evaluation protocol: a LeNet probe, last epoch, trained on synthetic only."""

    probe_epochs: PositiveInt = 10
    feature_epochs: PositiveInt = 5


class Plan(Section):
    """A whole plan. `facts()` is what is hashed, locked and handed out.

    `method`: the one line that changes the method (`planning.methods`). `embedding`, `evolution`
    and `central` are where its settings are written; a plan that was read has them under `stages`
    alone, where its method takes them.
    """

    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    budget: Budget
    private: Private
    public: Annotated[list[PublicSource], Field(min_length=1)]
    representation: Representation
    method: Method | None = later(None)
    embedding: Embedding | None = later(None)
    evolution: Evolution | None = later(None)
    central: Central | None = later(None)
    stages: Stages
    split: Literal["noise", "epsilon"] = "noise"
    velocity: Velocity = Velocity()
    tokens: Tokens | None = later(None)
    prior: AnyPrior = Prior()
    distillation: Distillation | None = None
    sampling: Sampling = Sampling()
    evaluation: Evaluation = Evaluation()
    public_seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, values: Any) -> Any:
        return with_token_numbers(with_code(with_method(values)))

    @model_validator(mode="after")
    def _method_fits(self) -> "Plan":
        require_method(self)
        return self

    @model_validator(mode="after")
    def _frozen_fits(self) -> "Plan":
        require_frozen(self)
        return self

    @model_validator(mode="after")
    def _tokens_fit(self) -> "Plan":
        require_token_plan(self)
        return self

    @model_validator(mode="after")
    def _code_fits(self) -> "Plan":
        image, space = self.private.image, self.representation
        require_code(
            (image.height, image.width, image.channels),
            space.kind,
            space.code,
            levels=space.levels,
            padded=space.padded,
            tokens=self.tokens,
            latent=self.frozen.latent if self.frozen else None,
        )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> "Plan":
        if self.distillation is not None and self.stages.moments is None:
            raise misfit("distillation needs stages.moments", "distillation")
        train = self.stages.train
        if train is not None and train.times != "uniform" and self.distillation is not None:
            raise misfit(
                f"stages.train.times: {train.times} draws from all of (0, 1), and after "
                "distillation training goes on from its horizon",
                "stages.train.times",
                hint="write `times: uniform`, or leave `distillation` out",
            )
        if self.sampling.method in {"release", "guide"} and self.stages.moments is None:
            raise misfit(
                f"sampling.method: {self.sampling.method} needs stages.moments",
                "sampling.method",
                "sampling",
                "stages",
                hint="declare stages.moments, or write `sampling: {method: flow}`",
            )
        return self

    @model_validator(mode="after")
    def _projection_fits(self) -> "Plan":
        moments, code = self.stages.moments, self.representation.code
        if moments is not None and (moments.projection or 0) >= code:
            raise misfit(
                f"stages.moments.projection is {moments.projection}, and a code has {code} numbers",
                "stages.moments.projection",
                hint=f"write `projection: {code - 1}` or less, or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _captions_fit(self) -> "Plan":
        require_captions(
            self.private.captions,
            self.stages.moments.captions if self.stages.moments else None,
            classes=self.private.classes,
            source=self.private.source,
            unit=self.budget.column,
            velocity=self.velocity.kind,
            space=self.representation.kind,
            moments=self.stages.moments is not None,
            drawn_for=self.sampling.captions is not None,
        )
        return self

    @model_validator(mode="after")
    def _unit_fits(self) -> "Plan":
        moments = self.stages.moments
        if self.budget.column is not None:
            sensitivity = moments.sensitivity if moments else None
            require_units(self.budget.column, self.private.source, sensitivity)
            if self.stages.evaluation is not None:
                require_named(self.private.held_out.by)
        return self

    @property
    def frozen(self) -> FrozenPrior | None:
        """The frozen text-to-image model that is the prior; None where it is pretrained here."""
        return self.prior if isinstance(self.prior, FrozenPrior) else None

    @property
    def pretraining(self) -> Prior:
        """How the prior is trained on public codes. Raises PlanError where it is frozen."""
        if isinstance(self.prior, FrozenPrior):
            raise PlanError("the plan's prior is frozen: there is no public training of it")
        return self.prior

    @property
    def has_codes(self) -> bool:
        """Whether records are seen as codes: an embedding is of their pixels, and needs none."""
        return self.stages.embedding is None

    @property
    def learns_tokens(self) -> bool:
        """Whether training learns a transformer of tokens, and there is no velocity model."""
        return self.representation.kind == "tokens"

    @property
    def is_completed(self) -> bool:
        """Whether `dpsynth complete-wavelet` makes the samples, of coarse ones drawn before."""
        return self.tokens is not None and self.tokens.levels > 0

    def facts(self) -> dict[str, Any]:
        """The plan without paths, as plain JSON values: what is hashed, locked and handed out."""
        return without_paths(self)

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> "Plan":
        """The plan of these facts, its paths mere placeholders: for replay, which opens none.

        Raises pydantic's ValidationError (a ValueError) where this version knows no such plan.
        """
        return cls.model_validate(with_paths(facts))
