"""LoRA factors beside the attention of a frozen transformer of diffusers, by peft.

The transformer's own weights never move: to the private engine each adapted layer is two linear
maps and a frozen one, which costs nothing (docs/engine.md).
"""

import math

import torch
from torch import Tensor, nn

from dpsynth.errors import MissingError, UsageError
from dpsynth.models.frozen.velocity import is_factor
from dpsynth.models.seeding import generator
from dpsynth.planning.optimizer import LowRank

ADAPTED = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
)  # fmt: skip
"""Linear maps of attention in diffusers' names: of the image's tokens, and of the text's."""


def add_factors(transformer: nn.Module, settings: LowRank, seed: int) -> None:
    """Put factors of `settings` beside the attention's linear maps; they alone are trainable.

    A is drawn as peft does (uniform, of variance 1 / (3 in)), by `seed`, on which privacy does not
    rest; B is zero, so that nothing changes yet. Both are float32 whatever the weights are. Names
    are peft's: `transformer_blocks.0.attn.to_q.lora_A.default.weight`. The module is changed.

    Raises:
        MissingError: peft is not installed.
        UsageError: a module without such attention, or one that has factors already.
    """
    if any(is_factor(name) for name, _ in transformer.named_parameters()):
        raise UsageError("the transformer has LoRA factors already")
    names = adapted_layers(transformer)
    if not names or not hasattr(transformer, "add_adapter"):
        raise UsageError(f"{type(transformer).__name__} is no transformer of diffusers")
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingError("peft is not installed", hint="pip install -e '.[sd3]'") from None
    transformer.requires_grad_(requires_grad=False)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.scale, target_modules=names)
    transformer.add_adapter(config)  # type: ignore[operator]
    source = generator(seed)
    for name, factor in transformer.named_parameters():
        factor.requires_grad_(is_factor(name))
        if is_factor(name):
            factor.data = _start(name, factor, source)


def _start(name: str, factor: Tensor, source: torch.Generator) -> Tensor:
    """A drawn, B zero; float32, drawn on the CPU."""
    start = torch.zeros(factor.shape)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=source)
    return start.to(factor.device)


def adapted_layers(transformer: nn.Module) -> list[str]:
    """Names of the linear maps that factors stand beside, in the module's order.

    The text's queries of a block that leaves the text as it is (the last one of Stable Diffusion
    3) are left out: nothing depends on them, and their factors would be noise.
    """
    return [
        name
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
        and name.endswith(tuple(f".{one}" for one in ADAPTED))
        and not _is_dead(transformer, name)
    ]


def _is_dead(transformer: nn.Module, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    attention = transformer.get_submodule(parent)
    return last == "add_q_proj" and bool(getattr(attention, "context_pre_only", False))


def start_factors(model: nn.Module) -> dict[str, Tensor]:
    """The factors of a model by `named_parameters()` names; empty where it has none."""
    return {name: p.detach() for name, p in model.named_parameters() if is_factor(name)}
