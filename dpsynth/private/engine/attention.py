"""`nn.MultiheadAttention` by linear maps: torch's own function hides its three products."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.private.engine.tape import Tape, Tracked


def multi_head_attention(linear: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of `multi_head_attention_forward`, its products carried out by `linear`."""

    def apply(tape: Tape, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """A linear map; without the tape where both of its parameters are frozen."""
        if not isinstance(weight, Tracked) and not isinstance(bias, Tracked):
            return functional.linear(x, weight, bias)
        y: Tensor = linear(tape, functional.linear, x, weight, bias)
        return y

    def rule(  # noqa: PLR0917 (as torch calls it)
        tape: Tape,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None,
        static_v: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values come as (T, B m, E); examples are put first for the maps."""
        odd = (bias_k, bias_v, static_k, static_v)
        if add_zero_attn or any(x is not None for x in odd) or query.ndim != 3:
            tape.refuse(func, in_proj_weight, out_proj_weight, q_proj_weight)
        if is_causal and attn_mask is None:
            raise UsageError(
                "MultiheadAttention got is_causal=True without a mask",
                hint="give attn_mask as well, as torch asks for: it says which tokens are seen",
            )
        del embed_dim_to_check  # is_causal with a mask is a hint: the mask says the same

        def project(x: Tensor, weight: Any, bias: Any) -> Tensor:
            y = apply(tape, x, weight, bias)
            return _heads(y, num_heads).transpose(1, 2)  # (B m, heads, T, E / heads)

        inputs = [x.transpose(0, 1) for x in (query, key, value)]
        biases = _thirds(tape, in_proj_bias)
        if use_separate_proj_weight:
            weights = [q_proj_weight, k_proj_weight, v_proj_weight]
        else:
            weights = _thirds(tape, in_proj_weight)
        if query is key and key is value and not use_separate_proj_weight:
            both = apply(tape, inputs[0], in_proj_weight, in_proj_bias)
            heads = both.view(*both.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = heads.unbind(0)
        else:
            q, k, v = (project(*one) for one in zip(inputs, weights, biases, strict=True))
        mask = _mask(attn_mask, key_padding_mask, num_heads, q)
        dropout = dropout_p if training else 0.0
        weights_found = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            attention = (scores if mask is None else scores + mask).softmax(-1)
            attention = functional.dropout(attention, dropout)
            mixed = attention @ v
            weights_found = attention.mean(1) if average_attn_weights else attention
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        merged = mixed.transpose(1, 2).flatten(2)
        out = apply(tape, merged, out_proj_weight, out_proj_bias)
        return out.transpose(0, 1), weights_found

    return rule


def _heads(y: Tensor, heads: int) -> Tensor:
    return y.view(*y.shape[:2], heads, -1)


def _thirds(tape: Tape, value: Any) -> list[Any]:
    """A packed projection's parts for query, key and value."""
    if value is None:
        return [None] * 3
    if isinstance(value, Tracked):
        return list(tape.derive(torch.chunk, value, 3))
    return [tape.constant(part) for part in value.chunk(3)]


def _mask(
    attention: Tensor | None, padding: Tensor | None, heads: int, query: Tensor
) -> Tensor | None:
    """One additive mask (B m or 1, heads or 1, T, S) of torch's two kinds."""
    found: Tensor | None = None
    if attention is not None:
        found = _additive(attention, query)
        found = found.view(-1, heads, *found.shape[1:]) if found.ndim == 3 else found[None, None]
    if padding is not None:
        keys = _additive(padding, query)[:, None, None]
        found = keys if found is None else found + keys
    return found


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
