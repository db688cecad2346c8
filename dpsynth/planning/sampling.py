"""How a plan draws its images."""

from typing import Annotated, Literal

from pydantic import Field

from dpsynth.planning.section import Fraction, PathField, PositiveInt, Section, later


class Jitter(Section):
    """Mild random movement of finished images: more variety for a classifier, less fidelity.

    Ranges, uniform both ways: degrees, and shares of the size and of the side.
    """

    rotation: Annotated[float, Field(ge=0, le=45, allow_inf_nan=False)] = 6.0
    scale: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.05
    shift: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.03


class Sampling(Section):
    """How images are drawn: from the released Gaussians, the flow's Euler sampler, or tokens.

    `generator`: by the one fitted to an embedding; `population`: members of the last vote round.

    `sharpen`: gain of an unsharp mask; `public` takes the one that gives decoded draws of public
    classes the gradient energy of their images. `augment`: also moves each image a little;
    samples without it are always drawn and measured beside. `temperature`, `top_k`: of tokens,
    public ones too. `captions`: public ones, for plans whose captions are free.
    """

    method: Literal["release", "flow", "guide", "tokens", "generator", "population"] = "release"
    start: Literal["plateau"] | Fraction = later("plateau")
    captions: PathField | None = later(None)
    count: PositiveInt = 10_000
    steps: PositiveInt = 25
    guidance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.5
    sharpen: Literal["public"] | Annotated[float, Field(ge=0, le=4, allow_inf_nan=False)] = later(
        0.0
    )
    augment: Jitter | None = later(None)
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = later(1.0)
    top_k: PositiveInt | None = later(None)
