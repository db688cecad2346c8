"""The releases that a plan declares: of moments (blocks, cells, ...), and of the evaluation."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsynth.planning.captions import CaptionRelease
from dpsynth.planning.section import PositiveFloat, PositiveInt, Section, later, misfit


class Blocks(Section):
    """Shares of the squared joint sensitivity: a^2 : b^2 : c^2, normalised to sum to one."""

    count: PositiveFloat = 0.05
    sum: PositiveFloat = 0.55
    second: PositiveFloat = 0.4


class RoundShares(Section):
    """Shares of 1/sigma^2 of a cell release: its first round, all Lloyd rounds, its last round."""

    first: PositiveFloat
    lloyd: PositiveFloat
    last: PositiveFloat


class Cells(Section):
    """Moments by cells inside each class, released in rounds (docs/maths/cells.md).

    `most`: cells a class may have; `lloyd`: DP-Lloyd rounds. What is left out follows from the
    declared N, classes, code size, epsilon and delta by a public rule (`planning.rounds`).
    `template`: publicly deformed decodings of each centre join the shrinkage targets.
    """

    most: Annotated[int, Field(ge=1, le=256)] | None = None
    lloyd: Annotated[int, Field(ge=0, le=16)] | None = None
    shares: RoundShares | None = None
    blocks: Blocks = Blocks(count=0.02, sum=0.08, second=0.9)
    template: bool = True


class Moments(Section):
    """The moment release (StraightDP, section 3.1): one Gaussian mechanism, or the paper's two.

    covariance: of each class, one `shared` by all, or `public`: counts and sums alone are
        released, and the covariance is that of the public images.
    groups: of `covariance: public`; a mean for each class, or one for `all` records. `auto`: by
        class where the declared numbers leave a class mean more than its noise
        (`planning.groups`).
    rank, floor, least_count: post-processing of the noisy second moments.
    """

    weight: PositiveFloat = 1.0
    covariance: Literal["class", "shared", "public"] = "class"
    sensitivity: Literal["tight", "paper"] = "tight"
    blocks: Blocks = Blocks()
    rank: PositiveInt | None = None
    floor: PositiveFloat = 1e-2
    least_count: PositiveFloat = 20.0
    spares: Annotated[int, Field(ge=0, le=3)] = 0
    cells: Cells | None = later(None)
    projection: PositiveInt | None = later(None)
    captions: CaptionRelease | None = later(None)
    groups: Literal["class", "all", "auto"] = later("class")

    @model_validator(mode="after")
    def _groups_fit(self) -> "Moments":
        if self.groups != "class" and self.covariance != "public":
            raise misfit(
                f"groups: {self.groups} releases no second moments, and covariance is "
                f"{self.covariance}",
                "groups",
                hint="write `covariance: public`, or leave `groups` out",
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "Moments":
        if self.sensitivity == "paper" and self.covariance != "shared":
            raise ValueError("sensitivity: paper needs covariance: shared")
        if self.sensitivity == "paper" and self.cells is not None:
            raise ValueError("cells need sensitivity: tight")
        if self.captions is not None and (self.cells is not None or self.covariance != "shared"):
            raise ValueError("a caption release needs covariance: shared, and has no cells")
        if self.cells is not None and self.covariance != "class":
            raise ValueError("cells need covariance: class (each cell has a covariance of its own)")
        return self


class MatrixBlocks(Section):
    """Shares of the squared joint sensitivity: one cell of the matrix, the number of answers."""

    cell: PositiveFloat = 0.8
    total: PositiveFloat = 0.2


class EvaluationRelease(Section):
    """A confusion matrix of the held-out records, released with noise (docs/maths/evaluation.md).

    The classifier is the first probe of `dpsynth evaluate` (with the plan's
    `evaluation.probe_epochs`), trained on `released/samples` alone.
    """

    weight: PositiveFloat = 0.1
    blocks: MatrixBlocks = MatrixBlocks()
    spares: Annotated[int, Field(ge=0, le=3)] = 0
