"""How DP-SGD moves which weights along the noisy gradient: post-processing, so free to choose."""

from typing import Annotated, Literal

from pydantic import Field

from dpsynth.planning.section import PositiveFloat, PositiveInt, Section

Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Sgd(Section):
    """Stochastic gradient descent, with momentum above 0 a moving sum of the gradients."""

    kind: Literal["sgd"]
    momentum: Decay = 0.0


class Adam(Section):
    """Adam (Kingma and Ba 2015, algorithm 1).

    `bias_correction`: take the noise's known variance out of the second moment (DP-AdamBC, Tang,
    Shpilevskiy and Lecuyer 2024). `floor`: the least that is left of it, as a share of the
    noise's variance.
    """

    kind: Literal["adam"] = "adam"
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: PositiveFloat = 1e-8
    bias_correction: bool = False
    floor: PositiveFloat = 0.1


class AdamW(Section):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    kind: Literal["adamw"]
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NotNegative = 0.01
    bias_correction: bool = False
    floor: PositiveFloat = 0.1


Optimizer = Annotated[Sgd | Adam | AdamW, Field(discriminator="kind")]


class Schedule(Section):
    """The learning rate by step: up over `warmup` steps, then level or down to 0 at the end."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0


class LowRank(Section):
    """LoRA: factors of `rank` beside a linear map, whose product is scaled by `scale` / `rank`."""

    rank: PositiveInt = 8
    scale: PositiveFloat = 8.0
