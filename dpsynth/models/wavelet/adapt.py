"""Which weights private training moves: the coarse part's, all of them, some, or beside them.

DP-Wavelet, section 3: full and partial updates, and LoRA (Hu et al. 2021). The fine part is frozen
in each.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from dpsynth.artifacts.low_rank import merged
from dpsynth.errors import UsageError
from dpsynth.models.preconditioned import tensor
from dpsynth.models.seeding import seeded_initialisation
from dpsynth.models.wavelet.autoregressive import Autoregressive

Update = Literal["full", "attention", "lora"]

ADAPTED = ("mix_in", "mix_out", "text_in", "up", "down")
"""Linear maps of a layer that LoRA stands beside."""
_ATTENTION = ("read", "place", "norm_mix", "mix_in", "mix_out", "text_in")


class LowRank(nn.Module):
    """A frozen linear map W x + b, and (scale / r) B A x beside it, B being zero at first.

    To the private engine these are two linear maps and a frozen one, which costs nothing. Names
    as in peft.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.factor = scale / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return tensor(self.base(x) + self.factor * self.lora_B(self.lora_A(x)))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One linear map that does the same; the same bits wherever it is made."""
        named = (self.base.weight, self.lora_A.weight, self.lora_B.weight)
        weight, down, up = (x.detach().cpu().numpy() for x in named)
        found = torch.from_numpy(merged(weight, down, up, self.factor))
        self.base.weight.copy_(found)
        return self.base


def train_coarse(
    model: Autoregressive, update: Update = "full", *, rank: int = 8, scale: float = 8.0, seed: int
) -> Autoregressive:
    """Leave of the weights those trainable that `update` moves, all in the coarse part.

    full: all of the part; attention: its attention and its reading of captions (what DP-LDM
    trains); lora: factors of `rank` beside its layers' linear maps, scaled by scale / rank. The
    model itself is changed and returned. seed: of LoRA's A, on which privacy does not rest.

    Raises:
        UsageError: an unknown update, a rank below 1, or a model that was adapted already.
    """
    if update not in ("full", "attention", "lora") or rank < 1:
        raise UsageError(
            f"no update {update!r} of rank {rank}",
            hint="full, attention, or lora of rank 1 or more",
        )
    if any(isinstance(layer, LowRank) for layer in model.modules()):
        raise UsageError("the transformer has LoRA factors already", hint="merge them first")
    model.requires_grad_(False)
    if update == "lora":
        _adapt(model, rank, scale, seed)
        return model
    for name, parameter in model.coarse.named_parameters():
        chosen = update == "full" or bool(set(name.split(".")) & set(_ATTENTION))
        parameter.requires_grad_(chosen)
    return model


def _adapt(model: Autoregressive, rank: int, scale: float, seed: int) -> None:
    with seeded_initialisation(seed):
        for layer in model.coarse.layers:
            for name in ADAPTED:
                base = layer.get_submodule(name)
                if not isinstance(base, nn.Linear):
                    raise UsageError(f"{name} is no linear map")
                beside = LowRank(base, rank, scale).to(base.weight)
                setattr(layer, name, beside)


def merge(model: Autoregressive) -> Autoregressive:
    """Put LoRA factors, if any, into the weights that they stand beside: a plain model again.

    The model itself is changed and returned, nothing of it trainable.
    """
    for layer in model.coarse.layers:
        for name, inner in list(layer.named_children()):
            if isinstance(inner, LowRank):
                setattr(layer, name, inner.merged())
    return model.requires_grad_(False)
