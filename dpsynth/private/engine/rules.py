"""The rule of each operation that a trainable parameter may enter: docs/engine.md lists them.

A rule carries the operation out without the parameter's gradient and notes what the per-example
gradients need. `m` rows on the first axis belong to one example, side by side.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpsynth.private.engine.attention import multi_head_attention
from dpsynth.private.engine.contributions import Factored, Gathered, Sampled, pieces, stored
from dpsynth.private.engine.convolution import convolution
from dpsynth.private.engine.tape import Given, Tape, Tracked, plain

_CACHED = 2**17
"""Numbers that are worked out and summed at a time, so that they stay in the cache."""


def linear(tape: Tape, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Y = x W^T + b on (B m, ..., I): factors (x, dy); the bias by the sum of dy over tokens."""
    if not tape.strangers(x, weight, bias):
        return tape.derive(func, x, weight, bias)
    if isinstance(x, Tracked) or tape.strangers(weight, bias):
        tape.refuse(func, x, weight, bias)
    output: Tensor = functional.linear(x, plain(weight), plain(bias))
    kept, examples = _as_used(x.detach()), tape.examples

    def given(g: Tensor) -> Given:
        g = stored(g).reshape(examples, -1, g.shape[-1])
        if not isinstance(weight, Tracked):
            return [(used, Sampled([g.sum(dim=1)]))]
        a = stored(kept).reshape(examples, -1, kept.shape[-1])
        return [(used, Factored(a, g, bias=len(used) == 2))]

    used = [one for one in (weight, bias) if isinstance(one, Tracked)]
    return tape.record("linear", output, used, given, kept)


def matmul(tape: Tape, func: Any, x: Tensor, other: Tensor) -> Any:
    """X @ W with a weight (I, O) on the right: a linear map."""
    if not tape.strangers(x, other):
        return tape.derive(func, x, other)
    if isinstance(x, Tracked) or not isinstance(other, Tracked) or other.ndim != 2 or x.ndim < 2:
        tape.refuse(func, x, other)
    return linear(tape, func, x, tape.derive(torch.t, other))


def embedding(  # noqa: PLR0917 (as torch calls it)
    tape: Tape,
    func: Any,
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table (V, D) by ids (B m, ...): the ghost norm with ids in the activations' part.

    `max_norm` and `scale_grad_by_freq` look at the whole batch and are refused.
    """
    del norm_type, sparse
    if isinstance(ids, Tracked) or max_norm is not None or scale_grad_by_freq:
        tape.refuse(func, weight)
    if not isinstance(weight, Tracked):
        raise TypeError("an embedding's rule got a weight that is not tracked")
    table: Tracked = weight
    output = functional.embedding(ids, table.plain)
    examples = tape.examples

    def given(g: Tensor) -> Given:
        rows = ids.reshape(examples, -1)
        g = stored(g).reshape(examples, rows.shape[1], -1)
        if padding_idx is not None:
            g = g * (rows != padding_idx % len(table.plain))[:, :, None]
        return [([table], Gathered(rows, g, len(table.plain)))]

    return tape.record("embedding", output, [table], given, ids)


def getitem(tape: Tape, func: Any, table: Tensor, index: Any) -> Any:
    """A slice of a parameter is a function of it; rows by the examples' ids are an embedding."""
    if not tape.strangers(table, index):
        return tape.derive(func, table, index)
    whole = isinstance(index, Tensor) and index.dtype == torch.long
    if not whole or not isinstance(table, Tracked) or table.ndim != 2:
        tape.refuse(func, table, index)
    return embedding(tape, func, index, table)


def layer_norm(  # noqa: PLR0917 (as torch calls it)
    tape: Tape,
    func: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """With y = xhat w + b: the sums over tokens of dy xhat and dy; xhat by the pass's moments."""
    if isinstance(x, Tracked) or tape.strangers(weight, bias):
        tape.refuse(func, x, weight, bias)
    kept, examples = x.detach(), tape.examples
    full = stored(kept) is kept and not torch.is_autocast_enabled(x.device.type)
    apply = torch.native_layer_norm if full else torch.layer_norm
    found: Any = apply(x, shape, plain(weight), plain(bias), eps)
    output, *moments = found if full else [found]
    moments = [y.detach() for y in moments]

    def given(g: Tensor) -> Given:
        g = stored(g).reshape(examples, -1, used[0].plain.numel())
        contributions: Given = []
        if isinstance(weight, Tracked):
            a = stored(kept)
            mean, scale = moments or torch.native_layer_norm(a, shape, None, None, eps)[1:]
            parts = [y.reshape(*g.shape[:2], -1) for y in (a, mean, scale)]
            contributions.append(([weight], Sampled([_normal_sums(g, *parts)])))
        if isinstance(bias, Tracked):
            contributions.append(([bias], Sampled([g.sum(dim=1)])))
        return contributions

    used = [one for one in (weight, bias) if isinstance(one, Tracked)]
    return tape.record("layer_norm", output, used, given, kept)


def _normal_sums(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Sums (B, P) over tokens of g (x - mean) scale, for g, x (B, T, P) and the rest (B, T, 1)."""
    sums = torch.empty_like(g[:, 0])
    for part in pieces(g[0].numel(), len(g), _CACHED):
        product = (x[part] - mean[part]).mul_(scale[part]).mul_(g[part])
        torch.sum(product, dim=1, out=sums[part])
    return sums


def group_norm(  # noqa: PLR0917 (as torch calls it)
    tape: Tape,
    func: Any,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalised by torch; scale and shift (C,) act on the second axis of (B m, C, ...)."""
    shape = (-1,) + (1,) * (x.ndim - 2)
    normal = functional.group_norm(x, groups, eps=eps)
    return _affine(tape, func, normal, weight, bias, shape)


def rms_norm(  # noqa: PLR0917 (as torch calls it)
    tape: Tape,
    func: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Normalised by torch; the scale is a product with a parameter."""
    return _affine(tape, func, functional.rms_norm(x, shape, eps=eps), weight, None)


def _affine(  # noqa: PLR0917 (as torch calls it)
    tape: Tape,
    func: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    if isinstance(x, Tracked):
        tape.refuse(func, x)
    for operation, value in ((torch.mul, weight), (torch.add, bias)):
        if isinstance(value, Tracked):
            x = operation(x, spread(tape, value, len(x), x.ndim, shape))
        elif value is not None:
            x = operation(x, value if shape is None else value.view(shape))
    return x


def elementwise(tape: Tape, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums and products that broadcast a parameter over the examples (B m, ...)."""
    strangers = tape.strangers(args, kwargs)
    if not strangers:
        return tape.derive(func, *args, **kwargs)
    axes = max(x.ndim for x in strangers)
    rows = max((len(x) for x in strangers if x.ndim == axes and axes > 0), default=0)

    def change(value: Any) -> Any:
        if not isinstance(value, Tracked):
            return value
        if axes == 0 or value.ndim > axes or (value.ndim == axes and len(value) != 1):
            tape.refuse(func, value)
        return spread(tape, value, rows, axes)

    return func(*map(change, args), **{key: change(value) for key, value in kwargs.items()})


def expand(tape: Tape, func: Any, value: Tensor, *sizes: Any) -> Any:
    """p.expand(B m, ...): a copy of the parameter for each example (class tokens, queries)."""
    shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(value, Tracked) or tape.strangers(shape):
        tape.refuse(func, value, shape)
    grows = len(shape) > value.ndim or (value.ndim > 0 and len(value) == 1)
    if not grows or shape[0] in (-1, 0) or shape[0] % tape.examples:
        return tape.derive(func, value, *sizes)
    return spread(tape, value, shape[0], len(shape)).expand(shape)


def spread(
    tape: Tape, value: Tracked, rows: int, axes: int, shape: tuple[int, ...] | None = None
) -> Tensor:
    """The parameter once a row, (rows, 1, ..., *shape), as a leaf whose gradient is per example."""
    inner = tuple(value.plain.shape) if shape is None else tuple(value.plain.view(shape).shape)
    inner = inner[1:] if len(inner) == axes else inner
    leaf = value.plain.reshape((1,) * (axes - len(inner)) + inner).expand(
        rows, *(1,) * (axes - len(inner) - 1), *inner
    )
    examples = tape.examples

    def given(g: Tensor) -> Given:
        return [([value], Sampled([stored(g).reshape(examples, -1, value.plain.numel()).sum(1)]))]

    return tape.record("spread", leaf, [value], given)


def _as_used(x: Tensor) -> Tensor:
    """An activation as the product reads it: rounded where autocast rounds it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x


_ELEMENTWISE: list[Any] = [
    *(torch.add, torch.sub, torch.mul, torch.div, torch.true_divide, torch.where, torch.addcmul),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.true_divide, Tensor.where),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__mul__),
    *(Tensor.__rmul__, Tensor.__truediv__, Tensor.__rtruediv__, torch.rsub, Tensor.addcmul),
    *(Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__),
]


def _named(rule: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """`rule` for callers that give arguments by torch's keywords: torch's name -> the rule's."""

    def called(tape: Tape, func: Any, *args: Any, **kwargs: Any) -> Any:
        return rule(tape, func, *args, **{names.get(key, key): x for key, x in kwargs.items()})

    return called


def _table_first(tape: Tape, func: Any, weight: Any, indices: Any, *args: Any, **kw: Any) -> Any:
    """`torch.embedding` takes the table first, -1 for no padding, and no `max_norm`."""
    del func
    names = ("padding_idx", "scale_grad_by_freq", "sparse")
    options = {**dict(zip(names, args, strict=False)), **kw}
    if options.get("padding_idx", -1) < 0:
        options["padding_idx"] = None
    return embedding(tape, functional.embedding, indices, weight, **options)


RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm),
        _named(matmul, input="x", mat2="other"),
    ),
    functional.linear: _named(linear, input="x"),
    functional.embedding: _named(embedding, input="ids"),
    torch.embedding: _table_first,
    Tensor.__getitem__: getitem,
    functional.layer_norm: _named(layer_norm, input="x", normalized_shape="shape"),
    functional.group_norm: _named(group_norm, input="x", num_groups="groups"),
    functional.rms_norm: _named(rms_norm, input="x", normalized_shape="shape"),
    Tensor.expand: expand,
    torch.broadcast_to: expand,
    Tensor.broadcast_to: expand,
    functional.conv1d: _named(convolution(functional.conv1d, 1), input="x"),
    functional.conv2d: _named(convolution(functional.conv2d, 2), input="x"),
    functional.multi_head_attention_forward: multi_head_attention(linear),
}
