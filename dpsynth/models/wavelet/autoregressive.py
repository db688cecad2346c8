"""The text-conditioned autoregressive transformer over spectral tokens, coarse to fine.

DP-Wavelet, section 3 and algorithm 2: the tokens of the scales up to j0 are predicted by weights of
their own (`coarse`), so that private training touches these alone; the finer ones by others
(`fine`), which see the coarse tokens through attention. In raster order (the setting of
DP-LlamaGen) there are no scales and no fine part: `coarse` predicts everything.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.models import text as captions
from dpsynth.models.wavelet.causal import Pair, Part, Sizes
from dpsynth.planning.velocity import TextStream

FORMAT = "dpsynth-spectral-transformer-1"


class Autoregressive(nn.Module):
    """p(token | tokens before it, caption), by two sets of weights or, in raster order, by one."""

    table: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        bounds = sizes.bounds
        self.coarse = Part(sizes, *bounds[0])
        self.fine = Part(sizes, *bounds[1]) if len(bounds) == 2 else None
        table = captions.table(sizes.text.vocabulary, sizes.text.width)
        self.register_buffer("table", table, persistent=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sets of weights, in the order of the tokens that they predict."""
        return (self.coarse,) if self.fine is None else (self.coarse, self.fine)

    def forward(self, ids: Tensor, text: Tensor) -> Tensor:
        """Logits (n, t, K) of each of the first t tokens, given those before it and the caption.

        ids: int64 (n, t), t from 1 to T; the last token is taken in by nothing. With no more than
        the coarse tokens the fine part does not run. text: see `vectors`.
        """
        if ids.ndim != 2 or not 1 <= ids.shape[1] <= self.sizes.tokens:
            raise UsageError(
                f"tokens came as {tuple(ids.shape)}, expected (n, 1 to {self.sizes.tokens})"
            )
        told, seen = self.vectors(text)
        past: list[Pair] | None = None
        found = []
        for part in self.parts:
            if ids.shape[1] > part.start:
                before = ids[:, max(0, part.start - 1) : min(part.stop, ids.shape[1]) - 1]
                logits, past = part(before, told, seen, past)
                found.append(logits)
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def vectors(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """A caption's rows (n, S, numbers), and which of them are words, bool (n, S).

        text: token ids int64 (n, S) of `models.text.tokens`, or numbers of a frozen encoder
        (n, S, numbers), which are words throughout.

        Raises:
            UsageError: another shape than the sizes say.
        """
        ids, stream = text.dtype == torch.int64, self.sizes.text
        wanted = (stream.length,) if ids else (stream.length, stream.width)
        if tuple(text.shape[1:]) != wanted:
            raise UsageError(f"captions came as {tuple(text.shape)}, expected (n, *{wanted})")
        if ids:
            return self.table[text], text != captions.PADDING
        return text.to(self.table.dtype), torch.ones_like(text[..., 0], dtype=torch.bool)

    def null(self, text: Tensor) -> Tensor:
        """The empty caption in the shape of `text`: what a dropped caption becomes."""
        if text.dtype != torch.int64:
            return torch.zeros_like(text)
        stream = self.sizes.text
        ids = captions.tokens([""], stream.length, stream.vocabulary)
        return ids.to(text.device).expand_as(text)


def token_losses(module: nn.Module, ids: Tensor, text: Tensor) -> Tensor:
    """Cross entropies (n, t) in nats of tokens (n, t), t <= T, given captions."""
    logits = module(ids, text)
    losses = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    return losses.view(ids.shape)


def coarse_losses(module: nn.Module, ids: Tensor, text: Tensor) -> Tensor:
    """One loss a record (B,), of the form that the private engine takes: nats a coarse token.

    ids: (B, t), or (B, M, t) for M images or views of a unit, over which the loss is averaged
    before the clip; text has the same first axes. Tokens past the coarse ones are cut off unread:
    they may as well be missing. In raster order all tokens are coarse.
    """
    if not isinstance(module, Autoregressive):
        raise UsageError(f"{type(module).__name__} has no coarse tokens")
    coarse = module.coarse.stop
    if ids.shape[-1] < coarse:
        raise UsageError(f"records have {ids.shape[-1]} tokens, expected {coarse} coarse ones")
    ids = ids[..., :coarse]
    if ids.ndim == 2:
        return token_losses(module, ids, text).mean(dim=1)
    # A unit's images side by side on the first axis, as the engine asks for.
    losses = token_losses(module, ids.flatten(0, 1), text.flatten(0, 1))
    return losses.view(len(ids), -1).mean(dim=1)


def drop_captions(text: Tensor, null: Tensor, rate: float, source: torch.Generator) -> Tensor:
    """Captions (B, ...) with each replaced by `null` (B, ...) with probability `rate`."""
    coins = torch.rand(len(text), generator=source).to(text.device)
    return torch.where((coins < rate).view(-1, *(1,) * (text.ndim - 1)), null, text)


def save_transformer(model: Autoregressive, path: Path, *, room: str, **facts: str) -> None:
    """Write the weights atomically as safetensors; `facts` are more metadata (such as hashes)."""
    arrays = {n: v.detach().cpu().contiguous().numpy() for n, v in model.state_dict().items()}
    save_tensors(path, arrays, {**facts, **_metadata(model.sizes), "room": room})


def load_transformer(
    path: Path, sizes: Sizes | None = None
) -> tuple[Autoregressive, dict[str, str]]:
    """Read a transformer in eval mode, and its metadata; `sizes`: those that a plan asks for.

    Raises:
        MissingError: no such file (from `load_tensors`).
        UsageError: no such model, damaged, or other sizes than the plan's.
    """
    arrays, metadata = load_tensors(path)
    found = _sizes_of(metadata, path.name)
    if sizes is not None and found != sizes:
        raise UsageError(
            f"{path.name} holds a transformer of {found}; the plan expects {sizes}",
            hint="the plan's sizes changed: start a new run folder with --run",
        )
    model = Autoregressive(found)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if wanted != {name: array.shape for name, array in arrays.items()}:
        raise UsageError(f"{path.name} does not hold the arrays that its own metadata declares")
    model.load_state_dict({n: torch.from_numpy(np.array(v, copy=True)) for n, v in arrays.items()})
    return model.eval(), metadata


def _metadata(sizes: Sizes) -> dict[str, str]:
    facts = asdict(sizes) | {"text": sizes.text.model_dump()}
    return {"format": FORMAT, "sizes": json.dumps(facts, sort_keys=True)}


def _sizes_of(metadata: dict[str, str], name: str) -> Sizes:
    if metadata.get("format") != FORMAT:
        raise UsageError(f"{name} has format {metadata.get('format')!r}, expected {FORMAT!r}")
    facts = json.loads(metadata["sizes"])
    return Sizes(**facts | {"text": TextStream(**facts["text"])})
