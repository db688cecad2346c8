"""Velocity models v(x, t, y) on codes: a residual MLP, a compact transformer, and the backbone.

The first two are built from Linear, LayerNorm and Embedding alone. All feed their layers tensors
whose first axis is the example, so that per-example gradients can be taken. An axis of noise draws
may follow it: the transformers fold that axis into the tokens around each layer, never into the
examples.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import PlanError, UsageError
from dpsynth.models.frozen.stored import load_frozen, save_frozen
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.models.mmdit import DualStreamVelocity
from dpsynth.models.patches import CodePatches
from dpsynth.models.preconditioned import (
    FREQUENCIES,
    PreconditionedVelocity,
    most_heads,
    tensor,
    time_features,
    zeroed,
)
from dpsynth.models.text import tokens
from dpsynth.planning.caption_rules import condition_captions
from dpsynth.planning.schema import ImageShape, Plan
from dpsynth.planning.velocity import Velocity
from dpsynth.planning.wavelets import band_of

FORMAT = "dpsynth-velocity-1"
DUAL = "dual"
"""Metadata key of the backbone's files: the plan's keys of `kind: mmdit`, as JSON."""


def build_velocity(
    settings: Velocity,
    dim: int,
    classes: int,
    *,
    captions: Sequence[str] | None = None,
    image: ImageShape | None = None,
) -> nn.Module:
    """Build the plan's velocity model for codes of `dim` numbers and `classes` labels.

    `forward(x, t, y)` takes x (B, d) with t (B,), or x (B, K, d) with t (B, K) for K noise draws
    an example; y (B,) holds labels, or y (B, K) one a draw, `classes` being the null label; it
    returns the shape of x.

    `captions` (one a label, numbers if None) and `image` (where x are pixels) matter to
    `kind: mmdit` alone.

    Raises:
        UsageError: captions or an image that do not fit, see `DualStreamVelocity`.
    """
    if settings.kind == "mmdit":
        return DualStreamVelocity(dim, classes, settings, captions=captions, image=image)
    kind = MlpVelocity if settings.kind == "mlp" else TransformerVelocity
    return kind(dim, classes, settings.width, settings.depth)


def build_for(plan: Plan) -> nn.Module:
    """The plan's velocity model with new weights: codes of its representation, its conditions.

    Raises PlanError where the prior is frozen: its weights are never new (`load_for`).
    """
    if plan.frozen is not None:
        raise PlanError("the plan's prior is frozen: there is no model of it with new weights")
    return build_velocity(
        plan.velocity,
        plan.representation.code,
        plan.private.conditions,
        captions=captions_of(plan),
        image=image_of(plan),
    )


def load_for(path: Path, plan: Plan) -> tuple[nn.Module, dict[str, str]]:
    """The plan's velocity model from a file, in eval mode, and the file's metadata.

    Of a frozen prior the file says which weights it stands for; they are loaded and compared.

    Raises:
        MissingError: no such file.
        PlanError: a frozen prior's weights changed.
        UsageError: the file holds another model than the plan's.
    """
    if plan.frozen is not None:
        return load_frozen(path, plan)
    return load_velocity(
        path,
        plan.velocity,
        plan.representation.code,
        plan.private.conditions,
        captions=captions_of(plan),
        image=image_of(plan),
    )


def captions_of(plan: Plan) -> list[str]:
    """The caption of each condition: fillings of the plan's template, else the class names."""
    return condition_captions(plan.private.captions, plan.private.classes)


def image_of(plan: Plan) -> ImageShape | None:
    """The image that a code is: the pixels, or a wavelet's LL0 band; None for other kinds."""
    image, space = plan.private.image, plan.representation
    if space.kind == "wavelet" and space.levels is not None:
        rows, columns = band_of(image.height, image.width, space.levels, space.padded)
        return ImageShape(height=rows, width=columns, channels=image.channels)
    return image if space.kind == "pixels" else None


def describe(model: nn.Module, captions: Sequence[str] | None) -> None:
    """From now on label y of a backbone means `captions[y]`, and null is label len(captions).

    None: the captions that it was built with again.

    Raises:
        UsageError: another kind of model, which has no caption stream.
    """
    if not isinstance(model, DualStreamVelocity):
        raise UsageError(
            f"{type(model).__name__} has no caption stream", hint="write velocity.kind: mmdit"
        )
    stream = model.text
    model.set_captions(
        None if captions is None else tokens(captions, stream.length, stream.vocabulary)
    )


class _Conditioned(PreconditionedVelocity):
    """Time and label conditioning of the MLP and the transformer."""

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__(dim, classes, width)
        self.label = nn.Embedding(classes + 1, width)
        self.time_in = nn.Linear(2 * FREQUENCIES, width)
        self.time_out = nn.Linear(width, width)

    def network(self, x: Tensor, times: Tensor, y: Tensor) -> Tensor:
        """See the base class."""
        time = self.time_out(functional.silu(self.time_in(time_features(times))))
        label = self.label(y) if y.ndim == 2 else self.label(y)[:, None]
        return self.learned(x, functional.silu(time + label))

    def learned(self, x: Tensor, condition: Tensor) -> Tensor:
        """The network's own part, (B, K, d), of x (B, K, d) and condition (B, K, width)."""
        raise NotImplementedError


class MlpVelocity(_Conditioned):
    """Residual MLP; each block is scaled and shifted by time and label."""

    def __init__(self, dim: int, classes: int, width: int, depth: int) -> None:
        super().__init__(dim, classes, width)
        self.enter = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(_MlpBlock(width) for _ in range(depth))
        self.leave = zeroed(nn.Linear(width, dim))

    def learned(self, x: Tensor, condition: Tensor) -> Tensor:
        """See the base class."""
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return tensor(self.leave(hidden))


class _MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.modulate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulate(condition).chunk(2, dim=-1)
        inner = self.up(self.norm(hidden)) * (1 + scale) + shift
        return hidden + tensor(self.down(functional.silu(inner)))


class TransformerVelocity(_Conditioned):
    """The code cut into at most eight tokens, with attention between them."""

    def __init__(self, dim: int, classes: int, width: int, depth: int) -> None:
        super().__init__(dim, classes, width)
        self.patches = CodePatches(dim, None)
        self.enter = nn.Linear(self.patches.size, width)
        self.position = nn.Embedding(self.patches.tokens, width)
        self.blocks = nn.ModuleList(
            _AttentionBlock(width, self.patches.tokens) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.leave = zeroed(nn.Linear(width, self.patches.size))

    def learned(self, x: Tensor, condition: Tensor) -> Tensor:
        """See the base class. Inside, tokens lie as (B, K * T, width)."""
        hidden = self.enter(self.patches.split(x))
        index = torch.arange(self.patches.tokens, device=x.device).expand(len(x), -1)
        hidden = hidden + self.position(index).repeat(1, x.shape[1], 1)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.patches.join(self.leave(self.norm(hidden)), x.shape[1])


class _AttentionBlock(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.heads = most_heads(width)
        self.modulate = nn.Linear(width, 4 * width)
        self.norm_mix, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulate(condition).repeat_interleave(self.tokens, dim=1).chunk(4, dim=-1)
        scale_mix, shift_mix, scale_up, shift_up = parts
        hidden = hidden + self._mix(self.norm_mix(hidden) * (1 + scale_mix) + shift_mix)
        inner = self.up(self.norm_up(hidden) * (1 + scale_up) + shift_up)
        return hidden + tensor(self.down(functional.silu(inner)))

    def _mix(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.mix_in(hidden).view(-1, self.tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B * K, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return tensor(self.mix_out(mixed.transpose(1, 2).reshape(batch, length, width)))


def save_velocity(
    model: nn.Module, path: Path, settings: Velocity, *, room: str, **facts: str
) -> None:
    """Write the weights atomically as safetensors; `facts` are more metadata (such as hashes).

    Of a frozen model its factors alone, beside what it is made of (`models.frozen.stored`).
    """
    if isinstance(model, FrozenVelocity):
        save_frozen(model, path, room=room, **facts)
        return
    tensors = {
        name: value.detach().cpu().contiguous().numpy()
        for name, value in model.state_dict().items()
    }
    save_tensors(path, tensors, {**facts, **_metadata(settings, model), "room": room})


def load_velocity(
    path: Path,
    settings: Velocity,
    dim: int,
    classes: int,
    *,
    captions: Sequence[str] | None = None,
    image: ImageShape | None = None,
) -> tuple[nn.Module, dict[str, str]]:
    """Read a velocity model in eval mode, and its metadata; arguments as in `build_velocity`.

    Raises:
        MissingError: no such file (from `load_tensors`).
        UsageError: the file holds another model than the plan's.
    """
    tensors, metadata = load_tensors(path)
    model = build_velocity(settings, dim, classes, captions=captions, image=image)
    expected = _metadata(settings, model)
    found = {key: metadata.get(key) for key in expected}
    if found != expected:
        raise UsageError(
            f"{path.name} holds the velocity model {found}; the plan expects {expected}",
            hint="the plan's velocity section changed: start a new run folder with --run",
        )
    _fill(model, tensors, path.name)
    return model.eval(), metadata


def _fill(model: nn.Module, tensors: dict[str, Any], name: str) -> None:
    wanted = model.state_dict()
    if {key: tuple(value.shape) for key, value in wanted.items()} != {
        key: tuple(value.shape) for key, value in tensors.items()
    }:
        raise UsageError(f"{name} does not hold the arrays that its own metadata declares")
    model.load_state_dict(
        {key: torch.from_numpy(np.array(value, copy=True)) for key, value in tensors.items()}
    )


def _metadata(settings: Velocity, model: nn.Module) -> dict[str, str]:
    """What a file says of its model. Captions are no part of it: weights fit any."""
    if not isinstance(model, PreconditionedVelocity):
        raise UsageError(f"{type(model).__name__} is no velocity model of dpsynth")
    facts = {
        "format": FORMAT,
        "kind": settings.kind,
        "width": str(settings.width),
        "depth": str(settings.depth),
        "dim": str(model.dim),
        "classes": str(model.classes),
    }
    if isinstance(model, DualStreamVelocity):
        keys = settings.model_dump(exclude={"kind", "width", "depth"})
        image = model.image.model_dump() if model.image is not None else None
        facts[DUAL] = json.dumps({**keys, "image": image}, sort_keys=True)
    return facts
