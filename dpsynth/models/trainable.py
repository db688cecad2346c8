"""Which weights of a flow private training moves: all, the last layer, attention, or factors."""

from torch import nn

from dpsynth.errors import UsageError
from dpsynth.models.frozen.adapters import start_factors
from dpsynth.models.mmdit import DualStreamVelocity
from dpsynth.models.velocity import TransformerVelocity

# What attends, and what a caption or label enters by. The backbone's `modulate` knows time alone.
_ATTENTION = {"mix_in", "mix_out", "norm_mix"}
_LABELS = _ATTENTION | {"label", "modulate"}
_CAPTIONS = _ATTENTION | {"gate", "inflow", "read", "place"}


def train_only(model: nn.Module, parameters: str) -> None:
    """Leave of a flow's weights those trainable that `stages.train.parameters` names.

    Raises:
        UsageError: `lora` of a model without factors (tokens and frozen priors alone have any),
            all else of one with factors, or `attention` of a model without any.
    """
    if start_factors(model):
        train_factors(model, parameters)
    elif parameters == "last":
        train_last(model)
    elif parameters == "attention":
        train_attention(model)
    elif parameters != "all":
        raise UsageError(
            f"a flow has no update {parameters!r}",
            hint="write `parameters: all`, last or attention",
        )


def train_factors(model: nn.Module, parameters: str = "lora") -> None:
    """Freeze all but the LoRA factors of a model that has them.

    Raises:
        UsageError: `parameters` is not `lora`.
    """
    if parameters != "lora":
        raise UsageError(
            f"no {parameters!r} of a frozen prior can be trained: its weights never move",
            hint="write `parameters: lora`",
        )
    factors = start_factors(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in factors)


def train_last(model: nn.Module) -> None:
    """Freeze all but the last linear layer, and the norm before it (`parameters: last`)."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] in {"norm", "leave"})


def train_attention(model: nn.Module) -> None:
    """Freeze all but attention and what conditions it on y (`parameters: attention`).

    The setting of DP-LDM (Liu et al. 2023, section 4: attention modules and the conditioning
    embedder; a baseline of DP-Wavelet). Of `transformer`: attention and its norm, the label's
    embedding and where it enters each block. Of `mmdit`: attention of both streams with the
    inflow between them, and the reading of captions. MLPs, times and patches stay as they are.

    Raises:
        UsageError: the MLP, which has no attention.
    """
    if isinstance(model, DualStreamVelocity):
        chosen = _CAPTIONS
    elif isinstance(model, TransformerVelocity):
        chosen = _LABELS
    else:
        raise UsageError(
            f"{type(model).__name__} has no attention",
            hint="write `velocity: {kind: transformer}` or mmdit, or `parameters: all`",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not chosen.isdisjoint(name.split(".")))
