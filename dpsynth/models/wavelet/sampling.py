"""Drawing tokens one after the other: a cache of keys and values, temperature, top-k, guidance.

DP-Wavelet, algorithm 2: coarse tokens come from the privately trained model, `sample(private, ...)`
up to j0; the frozen public one continues them, `sample(public, ..., prefix=coarse)`. Both are
post-processing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.wavelet.autoregressive import Autoregressive
from dpsynth.models.wavelet.causal import Layer, Part, visible


@dataclass(frozen=True)
class Drawing:
    """How a token is drawn from its logits.

    temperature: divides the logits, 0 takes the largest; top_k: only the k largest, None for all;
    guidance: g in l_null + g (l_caption - l_null), 1 for none.
    """

    temperature: float = 1.0
    top_k: int | None = None
    guidance: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what means nothing (UsageError)."""
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"sampling got temperature {self.temperature}, expected 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"sampling got top_k {self.top_k}, expected 1 or more")
        if not abs(self.guidance) < float("inf"):
            raise UsageError(f"sampling got guidance {self.guidance}, expected a number")


class Reader:
    """A model that has read some tokens of n images; it takes each token in once.

    Keys and values lie in one buffer a layer, the caption's S first: (n, heads, S + T, numbers).
    """

    def __init__(self, model: Autoregressive, text: Tensor) -> None:
        """Start with nothing read, for captions (n, ...) as `Autoregressive.vectors` takes."""
        self._model, sizes = model, model.sizes
        self._told, self._seen = model.vectors(text)
        self._read = 0
        self._length = self._told.shape[1]
        layer = _layer(model.coarse.layers[0])
        shape = (len(text), layer.heads, self._length + sizes.tokens, sizes.width // layer.heads)
        self._kept = [self._told.new_empty(2, *shape) for _ in range(sizes.depth)]

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Take in the next tokens (n, t); logits (n, K) of the one that follows.

        The very first call may give none, (n, 0), and has the logits of the first token.
        """
        first = self._read
        end = first + ids.shape[1] + (first == 0)
        if not first < end <= self._model.sizes.tokens:
            raise UsageError(f"no token follows {ids.shape[1]} more after place {first}")
        self._read, taken, logits = end, 0, self._told
        for part in self._model.parts:
            start, stop = max(first, part.start), min(end, part.stop)
            if start < stop:
                count = stop - start - (start == 0)
                if start == part.start:
                    self._listen(part)
                logits = self._run(part, ids[:, taken : taken + count], start, stop)
                taken += count
        return logits

    def _listen(self, part: Part) -> None:
        """Put the caption into the buffers, as this part reads it."""
        told = part.told(self._told)
        for layer, kept in zip(part.layers, self._kept, strict=True):
            kept[0, :, :, : self._length], kept[1, :, :, : self._length] = _layer(layer).given(told)

    def _run(self, part: Part, before: Tensor, start: int, stop: int) -> Tensor:
        """Logits (n, K) at place stop - 1, from places `start` on of one part."""
        hidden = part.entered(before, start, stop - start)
        mask = visible(self._seen, stop - start, stop)
        begin, end = self._length + start, self._length + stop
        for each, kept in zip(part.layers, self._kept, strict=True):
            layer = _layer(each)
            query, kept[0, :, :, begin:end], kept[1, :, :, begin:end] = layer.asked(hidden)
            keys, values = kept[:, :, :, :end]
            mixed = functional.scaled_dot_product_attention(query, keys, values, mask)
            hidden = layer.moved(hidden, mixed)
        return part.left(hidden[:, -1:], stop - 1)[:, 0]


@torch.no_grad()
def sample(
    model: Autoregressive,
    text: Tensor,
    coins: Tensor,
    drawing: Drawing | None = None,
    *,
    prefix: Tensor | None = None,
) -> Tensor:
    """Tokens (n, p + m): the prefix (n, p), none by default, and m drawn after it.

    coins: uniform on [0, 1), float64 (n, m); an image's tokens depend on its own row of coins,
    caption and prefix alone, so that images may be drawn in any company.

    Raises:
        UsageError: more tokens than the model has, or rows that do not belong together.
    """
    drawing = drawing or Drawing()
    ids = coins.new_empty((len(coins), 0), dtype=torch.int64) if prefix is None else prefix
    count = coins.shape[1]
    if not len(ids) == len(coins) == len(text):
        raise UsageError(f"{len(coins)} rows of coins, {len(text)} captions, {len(ids)} prefixes")
    if ids.shape[1] + count > model.sizes.tokens:
        raise UsageError(
            f"asked for {ids.shape[1]} + {count} tokens of a model of {model.sizes.tokens}"
        )
    found, new = [ids], ids
    reader = Reader(model, _branches(model, text, drawing.guidance))
    for step in range(count):
        logits = _guided(reader, new, drawing.guidance)
        new = pick(logits, coins[:, step], drawing)[:, None]
        found.append(new)
    return torch.cat(found, dim=1)


def pick(logits: Tensor, coins: Tensor, drawing: Drawing) -> Tensor:
    """Tokens (n,) by inverting the distribution function of logits (n, K) at coins (n,)."""
    if drawing.temperature == 0:
        return logits.argmax(dim=1)
    scaled = logits.double() / drawing.temperature
    top = min(drawing.top_k or logits.shape[1], logits.shape[1])
    order = None
    if top < logits.shape[1]:
        scaled, order = scaled.topk(top, dim=1)
    heights = scaled.softmax(dim=1).cumsum(dim=1)
    at = coins.to(heights)[:, None] * heights[:, -1:]
    place = torch.searchsorted(heights, at, right=True).clamp(max=top - 1)
    return (place if order is None else order.gather(1, place))[:, 0]


def _branches(model: Autoregressive, text: Tensor, guidance: float) -> Tensor:
    """The captions that the model reads: given ones, empty ones, or both in one batch."""
    if guidance == 1.0:
        return text
    null = model.null(text)
    return null if guidance == 0.0 else torch.cat([text, null])


def _guided(reader: Reader, new: Tensor, guidance: float) -> Tensor:
    """Logits (n, K) with classifier-free guidance, as in `models.flow.guided`."""
    if guidance in (0.0, 1.0):
        return reader.read(new)
    given, null = reader.read(torch.cat([new, new])).chunk(2)
    return null + guidance * (given - null)


def _layer(module: object) -> Layer:
    if not isinstance(module, Layer):
        raise UsageError(f"{type(module).__name__} is no layer of the transformer")
    return module
