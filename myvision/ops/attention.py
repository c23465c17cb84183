"""Scaled dot-product attention: the functional API, and what torch must know of the operator."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import (
    check,
    check_floating,
    check_like,
    check_number,
    check_output_mask,
    check_same_device,
    check_tensors,
    is_integer,
    name_of,
)
from myvision._dispatch.arguments import arguments_of, call_by_name, needs_of
from myvision._dispatch.autocast import cast_to, register_autocast
from myvision._dispatch.autograd import past_autograd, register_autograd, register_second_derivative
from myvision._dispatch.fake import register_fake
from myvision._dispatch.overrides import overridable
from myvision._dispatch.tracing import constant
from myvision._dispatch.vjp import gradients_of
from myvision._dispatch.vmap import register_vmap
from myvision._formulas.attention import attention as formula
from myvision.ops._dropout import check_dropout, check_probability, new_seed
from myvision.ops._norm import real_dtype

_attention = torch.ops.myvision.attention.default
_with_lse = torch.ops.myvision.attention.with_lse
_forward = torch.ops.myvision._attention_forward.default
_backward = torch.ops.myvision._attention_backward.default
_first_backward = past_autograd(_backward)

Alignment = Literal["top_left", "bottom_right"]
Window = int | tuple[int | None, int | None] | None
_OP = "attention"
_LARGEST_CAP = torch.finfo(torch.float32).max


# fmt: off
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: Alignment = "top_left", window: Window = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: Alignment = "top_left", window: Window = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
# fmt: on
@overridable
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: Alignment = "top_left",
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention, ``softmax(query @ key.T * scale + ...) @ value``, that never keeps the scores in memory.

    A superset of :func:`torch.nn.functional.scaled_dot_product_attention`, whose arguments mean the same. Every option
    goes through the same fused kernel, forward and backward, in memory that grows with the length, not with its square.
    In full, with ``shift = 0`` (``key length - query length`` where ``causal_alignment`` is ``"bottom_right"``)::

        score[i, j] = cap(query[i] . key[j] * scale) - slope * |j - i - shift| + attn_mask[i, j]
        output[i]   = sum over j of dropout(softmax(score[i]))[j] * value[j]

    A query sees those keys that the mask, ``is_causal`` and ``window`` leave it; all three may be given together. Keys
    that it does not see have no influence at all, even where they or their values are NaN. A query that sees no key has
    output 0 and gradient 0, and ``-inf`` as its ``lse``. Half types are computed in float32.

    Args:
        query: ``[..., heads, queries, width]``, of float64, float32, float16 or bfloat16, with 2 dimensions or more,
            and any strides.
        key: ``[..., heads, keys, width]``, of the same dtype (under autocast they may differ).
        value: ``[..., heads, keys, value width]``. Batch dimensions, and heads of size 1, broadcast.
        attn_mask: broadcastable to ``[..., heads, queries, keys]``, with any number of dimensions: bool, where True
            means that the key is seen, or added to the scores, of the query's dtype or float32; -inf there means that
            the key is not seen. It has a gradient, and is never expanded in memory. Default: none.
        dropout_p: with what probability a weight is dropped, **also in evaluation**, as in torch; the others are scaled
            by ``1 / (1 - dropout_p)``. Which ones follows from a number of torch's default generator, so that
            :func:`torch.manual_seed` repeats it, on any number of threads; no mask is kept for backward. Default: 0.
        is_causal: query ``i`` sees the keys ``j <= i + shift``. Default: False.
        scale: factor of the products. Default: ``1 / sqrt(width)``.
        enable_gqa: query may have a multiple of the heads of key and value, each of which then serves as many
            neighbouring heads; nothing is repeated in memory, unless key and value differ in heads: then the one with
            fewer is. Default: False.
        causal_alignment: where the diagonal of ``is_causal``, ``window`` and ``alibi_slopes`` lies: ``"top_left"``,
            query 0 beside key 0, as in torch, or ``"bottom_right"``, the last query beside the last key, as in decoding
            with a cache. Default: ``"top_left"``.
        window: ``(left, right)``: query ``i`` sees ``i + shift - left <= j <= i + shift + right``; None for no limit,
            one number for both. Default: no limit.
        softcap: ``cap(x) = softcap * tanh(x / softcap)``. 0, infinity and what else lies beyond float32's range are no
            cap. Default: no cap.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, of float32: how fast scores fall with the distance. Without a
            gradient. Default: none.
        return_lse: return ``lse`` as well, ``log(sum over j of exp(score[i, j]))``, with which partial results can be
            merged. It has a gradient. Default: False.

    Returns:
        ``[..., heads, queries, value width]``, of the query's dtype. In memory heads lie inside of lengths where they
        do so in ``query``: then ``transpose(1, 2).flatten(2)`` of it needs no copy. With ``return_lse``:
        ``(output, lse)``, ``lse`` being ``[..., heads, queries]`` of float32, or float64 for float64.

    Raises:
        TypeError: an argument is no tensor or no number where it must be one.
        RuntimeError: shapes, dtypes or devices do not fit together, or an option is out of its range.

    Example::

        >>> import torch
        >>> from myvision.ops import scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64)
        >>> scaled_dot_product_attention(query, key, value, is_causal=True, window=(31, 0)).shape
        torch.Size([2, 8, 128, 64])

    Papers: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, `FlashAttention-2
    <https://arxiv.org/abs/2307.08691>`_, `Online normalizer calculation for softmax
    <https://arxiv.org/abs/1805.02867>`_, `GQA <https://arxiv.org/abs/2305.13245>`_, `Train Short, Test Long (ALiBi)
    <https://arxiv.org/abs/2108.12409>`_, `Longformer (windows) <https://arxiv.org/abs/2004.05150>`_.
    """
    tensors = {"query": query, "key": key, "value": value}
    _check_types(tensors, dropout_p, scale, softcap, attn_mask=attn_mask, alibi_slopes=alibi_slopes)
    check_probability(_OP, dropout_p)
    _check_dimensions(query, key, value)
    _check_heads(query, key, enable_gqa)
    batch = None
    if not _have_one_batch_dimension(query, key, value):
        dims = max(query.dim(), key.dim(), value.dim())
        query, key, value, attn_mask, batch = _with_one_batch_dimension(query, key, value, attn_mask)
    query, key, value = _with_equal_heads(query, key, value, enable_gqa)
    inputs = query, key, value, attn_mask, alibi_slopes, None, None, new_seed(query, dropout_p)
    arguments = *inputs, dropout_p, is_causal, causal_alignment, *_window(window), scale, _cap(softcap)
    output, lse = _with_lse(*arguments) if return_lse else (_attention(*arguments), None)
    if batch is not None:
        leading = () if dims == 2 else (*batch, output.shape[1])
        output = output.reshape(*leading, *output.shape[2:])
        lse = None if lse is None else lse.reshape(*leading, lse.shape[2])
    return output if lse is None else (output, lse)


# fmt: off
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: Alignment = "top_left", window: Window = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: Alignment = "top_left", window: Window = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
# fmt: on
@overridable
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: Alignment = "top_left",
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention within each of several sequences of any lengths that lie one after the other, without padding.

    Sequence ``b`` has the queries ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])``, and keys likewise. Within it everything
    is as for :func:`scaled_dot_product_attention`; there is no mask.

    Args:
        query: ``[rows, heads, width]``, of float64, float32, float16 or bfloat16 and any strides.
        key: ``[key rows, heads, width]``, of the same dtype.
        value: ``[key rows, heads, value width]``, with the heads of key.
        cu_seqlens_q: ``[sequences + 1]``, of int32 or int64: 0, then where each sequence ends, at last ``rows``. On a
            GPU, where checking would mean waiting, what leaves the tensor is cut off, and rows of no sequence get 0.
        cu_seqlens_k: likewise for key and value.
        dropout_p, is_causal, scale, enable_gqa, causal_alignment, window, softcap, alibi_slopes, return_lse: as for
            :func:`scaled_dot_product_attention`; lengths are those of each sequence, and ``alibi_slopes`` may be
            ``[sequences, heads]``.

    Returns:
        ``[rows, heads, value width]``; with ``return_lse`` also ``lse``, ``[heads, rows]``.

    Raises:
        TypeError: an argument is no tensor or no number where it must be one.
        RuntimeError: shapes, dtypes or devices do not fit together, an option is out of its range, or, on the CPU,
            ``cu_seqlens`` does not run from 0 to the number of rows without falling.

    Example::

        >>> import torch
        >>> from myvision.ops import varlen_attention
        >>> query, key, value = torch.randn(3, 100, 8, 64)
        >>> ends = torch.tensor([0, 30, 100])
        >>> varlen_attention(query, key, value, ends, ends, is_causal=True).shape
        torch.Size([100, 8, 64])

    Papers: as for :func:`scaled_dot_product_attention`.
    """
    tensors = {"query": query, "key": key, "value": value, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_types(tensors, dropout_p, scale, softcap, alibi_slopes=alibi_slopes)
    check_probability(_OP, dropout_p)
    if query.dim() == key.dim() == 3:
        _check_heads(query.transpose(0, 1), key.transpose(0, 1), enable_gqa)
    inputs = query, key, value, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k, new_seed(query, dropout_p)
    arguments = *inputs, dropout_p, is_causal, causal_alignment, *_window(window), scale, _cap(softcap)
    return _with_lse(*arguments) if return_lse else _attention(*arguments)


def _window(window: Window) -> tuple[int | None, int | None]:
    pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2 or not all(side is None or is_integer(side) for side in pair):
        raise TypeError(f"attention: window must be an int or a pair of ints or None, within int64, but is {window!r}")
    return pair


def _cap(softcap: float | None) -> float:
    """0, no cap, for what is infinite in the kernel's float32, where it would give NaN."""
    return 0.0 if softcap is None or softcap > _LARGEST_CAP else softcap


def _check_types(
    tensors: dict[str, Tensor], dropout_p: float, scale: float | None, softcap: float | None, **optional: Tensor | None
) -> None:
    check_tensors(_OP, tensors, **optional)
    check_number("attention: dropout_p", dropout_p)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            check_number(f"attention: {name}", number)


def _check_dimensions(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise RuntimeError(
                f"attention: {name} must have 2 dimensions or more, [..., heads, length, width], but has shape "
                f"{tuple(tensor.shape)}"
            )


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if enable_gqa or query.dim() < 3 or key.dim() < 3:
        return
    heads, key_heads = constant(query.shape[-3]), constant(key.shape[-3])
    if heads != key_heads and 1 not in (heads, key_heads):
        raise RuntimeError(
            f"attention: query has {heads} heads and key {key_heads}; enable_gqa=True lets a head of key serve several"
        )


def _have_one_batch_dimension(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """And of the same size."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    size, key_size, value_size = (constant(tensor.shape[0]) for tensor in (query, key, value))
    return size == key_size == value_size


def _with_one_batch_dimension(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Sequence[int]]:
    """Of 4 dimensions, without a copy where their strides allow it; and the batch dimensions that they stood for."""
    rows = [tensor if tensor.dim() > 2 else tensor.unsqueeze(0) for tensor in (query, key, value)]
    batch = _broadcast(*(tensor.shape[:-3] for tensor in rows))
    query, key, value = (
        tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:]) for tensor in rows
    )
    if attn_mask is not None and attn_mask.dim() > 3:
        if attn_mask.shape[:-3].numel() != 1:
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:])
        attn_mask = attn_mask.reshape(-1, *attn_mask.shape[-3:])
    return query, key, value, attn_mask, batch


def _broadcast(query: torch.Size, key: torch.Size, value: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(query, key, value)
    except RuntimeError as error:
        raise RuntimeError(
            "attention: query, key and value must have batch dimensions that broadcast, but query has "
            f"{tuple(query)}, key {tuple(key)}, value {tuple(value)}"
        ) from error


def _with_equal_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Those with one head get more, as broadcasting would; the operator lets many heads of query share one of key."""
    heads = max(constant(key.shape[1]), constant(value.shape[1]))
    if heads == 1:
        return query, key, value
    query, key, value = (
        tensor.expand(-1, heads, -1, -1) if constant(tensor.shape[1]) == 1 else tensor for tensor in (query, key, value)
    )
    return (query, _with_heads(key, heads), _with_heads(value, heads)) if enable_gqa else (query, key, value)


def _with_heads(tensor: Tensor, heads: int) -> Tensor:
    """Each head serves as many neighbouring ones; as it is where it has as many, or where they do not divide."""
    own = constant(tensor.shape[1])
    return tensor.repeat_interleave(heads // own, dim=1) if 0 < own < heads and heads % own == 0 else tensor


# ---- what the operators return, and what they reject: the same as csrc/ops/attention/attention.cpp -------------------


def _check_starts(name: str, starts: Tensor | None, query: Tensor) -> None:
    check(_OP, starts is not None, lambda: f"cu_seqlens_q and cu_seqlens_k must both be given, but {name} is None")
    assert starts is not None
    check(
        _OP,
        starts.dtype in (torch.int32, torch.int64),
        lambda: f"{name} must have dtype int32 or int64, but has {name_of(starts.dtype)}",
    )
    check(
        _OP,
        starts.dim() == 1 and starts.shape[0] >= 1,
        lambda: (
            f"{name} must have one dimension, of one more than there are sequences, but has shape {tuple(starts.shape)}"
        ),
    )
    check_same_device(_OP, name, starts, query, "query")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, packed: bool) -> None:
    wanted = "3 dimensions, [rows, heads, width]" if packed else "4 dimensions, [batch, heads, length, width]"
    length, heads = (0, 1) if packed else (2, 1)

    def check_rank(name: str, tensor: Tensor) -> None:
        check(
            _OP,
            tensor.dim() == (3 if packed else 4),
            lambda: f"{name} must have {wanted}, but has shape {tuple(tensor.shape)}",
        )

    def check_same(names: str, what: str, first: Tensor, second: Tensor, dim: int) -> None:
        one, other = names.split()
        check(
            _OP,
            first.shape[dim] == second.shape[dim],
            lambda: (
                f"{one} and {other} must have the same {what}, but {one} has shape {tuple(first.shape)}, "
                f"{other} {tuple(second.shape)}"
            ),
        )

    check_rank("query", query)
    check_rank("key", key)
    check_rank("value", value)
    if not packed:
        check_same("query key", "batch size", query, key, 0)
        check_same("key value", "batch size", key, value, 0)
    check_same("query key", "width", query, key, -1)
    check_same("key value", "length", key, value, length)
    check_same("key value", "number of heads", key, value, heads)
    count, key_count = query.shape[heads], key.shape[heads]
    check(
        _OP,
        count == 0 if key_count == 0 else count % key_count == 0,
        lambda: (
            f"the heads of query must be a multiple of those of key, but query has shape {tuple(query.shape)}, "
            f"key {tuple(key.shape)}"
        ),
    )


def _check_mask(mask: Tensor | None, query: Tensor, key: Tensor, packed: bool) -> None:
    if mask is None:
        return
    check(_OP, not packed, lambda: "attn_mask and cu_seqlens_q exclude each other")
    check(
        _OP,
        mask.dtype in (torch.bool, query.dtype, torch.float32),
        lambda: (
            f"attn_mask must have dtype bool, float32 or that of query, {name_of(query.dtype)}, "
            f"but has {name_of(mask.dtype)}"
        ),
    )
    check_same_device(_OP, "attn_mask", mask, query, "query")
    wanted = (*query.shape[:3], key.shape[2])
    fits = mask.dim() <= 4
    for size, wanted_size in zip(reversed(mask.shape), reversed(wanted), strict=False):
        fits = fits and (size == 1 or size == wanted_size)
    check(
        _OP,
        fits,
        lambda: (
            f"attn_mask must have at most 4 dimensions that broadcast to {wanted}, but has shape {tuple(mask.shape)}"
        ),
    )


def _check_slopes(slopes: Tensor | None, query: Tensor, batch: int) -> None:
    if slopes is None:
        return
    check(
        _OP,
        slopes.dtype == torch.float32,
        lambda: f"alibi_slopes must have dtype float32, but has {name_of(slopes.dtype)}",
    )
    check_same_device(_OP, "alibi_slopes", slopes, query, "query")
    heads = query.shape[1]
    fits = (slopes.dim() == 1 or (slopes.dim() == 2 and slopes.shape[0] == batch)) and slopes.shape[-1] == heads
    check(
        _OP,
        fits,
        lambda: (
            f"alibi_slopes must have one number for each of the {heads} heads, or [batch, heads], "
            f"but has shape {tuple(slopes.shape)}"
        ),
    )


def _check_window(name: str, window: int | None) -> None:
    check(
        _OP,
        window is None or window >= 0,
        lambda: f"{name} must be at least 0, or None for no limit, but is {window}",
    )


def _is_packed(call: Any) -> bool:
    return call.cu_seqlens_q is not None or call.cu_seqlens_k is not None


def _check_call(call: Any) -> None:
    query, key, packed = call.query, call.key, _is_packed(call)
    check_floating(_OP, "query", query)
    check_like(_OP, "key", key, query, "query")
    check_like(_OP, "value", call.value, query, "query")
    batch = query.shape[0]
    if packed:
        _check_starts("cu_seqlens_q", call.cu_seqlens_q, query)
        _check_starts("cu_seqlens_k", call.cu_seqlens_k, query)
        lengths = call.cu_seqlens_q.shape[0], call.cu_seqlens_k.shape[0]
        check(
            _OP,
            lengths[0] == lengths[1],
            lambda: "cu_seqlens_q and cu_seqlens_k must have the same length, but have {} and {}".format(*lengths),
        )
        batch = lengths[0] - 1
    _check_shapes(query, key, call.value, packed)
    _check_mask(call.attn_mask, query, key, packed)
    _check_slopes(call.alibi_slopes, query, batch)
    check_probability(_OP, call.dropout_p)
    check(
        _OP,
        call.causal_alignment in ("top_left", "bottom_right"),
        lambda: f"causal_alignment must be 'top_left' or 'bottom_right', but is '{call.causal_alignment}'",
    )
    check(_OP, call.softcap >= 0, lambda: f"softcap must be at least 0, but is {call.softcap:g}")
    _check_window("window_left", call.window_left)
    _check_window("window_right", call.window_right)
    check_dropout(_OP, call.dropout_p, call.seed, query, "query")


def _new_rows(like: Tensor, width: int) -> Tensor:
    """Of the sizes of `like` but for its width; heads lie inside of lengths where they do in `like`."""
    if like.dim() == 4 and like.stride(1) < like.stride(2):
        batch, heads, length, _ = like.shape
        return like.new_empty((batch, length, heads, width)).transpose(1, 2)
    return like.new_empty((*like.shape[:-1], width))


def _new_lse(query: Tensor, packed: bool) -> Tensor:
    shape = (query.shape[1], query.shape[0]) if packed else query.shape[:-1]
    return query.new_empty(shape, dtype=real_dtype(query))


def _new_statistics(query: Tensor, packed: bool) -> Tensor:
    """Of each row the largest score, and the logarithm of the sum of exponentials of scores less that."""
    lse = _new_lse(query, packed)
    return lse.new_empty((*lse.shape, 2))


def _fake(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_call(call)
    query, packed = call.query, _is_packed(call)
    return _new_rows(query, call.value.shape[-1]), _new_lse(query, packed), _new_statistics(query, packed)


def _check_result(name: str, tensor: Tensor, like: Tensor, query: Tensor) -> None:
    """What forward returned, or the gradient of it."""
    fits = tensor.dtype == like.dtype and tensor.dim() == like.dim()
    for size, wanted in zip(tensor.shape, like.shape, strict=False):
        fits = fits and size == wanted
    check(
        _OP,
        fits,
        lambda: (
            f"{name} must be {name_of(like.dtype)} of shape {tuple(like.shape)}, "
            f"but is {name_of(tensor.dtype)} of shape {tuple(tensor.shape)}"
        ),
    )
    check_same_device(_OP, name, tensor, query, "query")


def _fake_backward(call: Any) -> tuple[Tensor | None, ...]:
    like_output, like_lse, like_statistics = _fake(call)
    query, key, value, mask, wanted = call.query, call.key, call.value, call.attn_mask, call.output_mask
    check_output_mask(_OP, wanted, 4)
    check(
        _OP,
        not wanted[3] or (mask is not None and mask.dtype != torch.bool),
        lambda: "a gradient of attn_mask is wanted, but there is no additive one",
    )
    _check_result("grad_output", call.grad_output, like_output, query)
    _check_result("output", call.output, like_output, query)
    _check_result("statistics", call.statistics, like_statistics, query)
    if call.grad_lse is not None:
        _check_result("grad_lse", call.grad_lse, like_lse, query)
    return (
        _new_rows(query, query.shape[-1]) if wanted[0] else None,
        _new_rows(key, key.shape[-1]) if wanted[1] else None,
        _new_rows(value, value.shape[-1]) if wanted[2] else None,
        mask.new_empty(mask.shape) if wanted[3] else None,
    )


# ---- derivatives: the first by the fused kernels, the others through the formula -------------------------------------

_Arguments = arguments_of(_attention)
_FIRST_OPTION = _Arguments._fields.index("dropout_p")  # before it stand the tensors


def _setup_context(ctx: Any, call: Any, results: tuple[Tensor, Tensor, Tensor]) -> None:
    if needs_of(_Arguments, ctx).alibi_slopes:
        raise NotImplementedError("attention: alibi_slopes has no gradient; pass alibi_slopes.detach()")
    ctx.set_materialize_grads(False)
    output, _, statistics = results
    ctx.save_for_backward(output, statistics, *call[:_FIRST_OPTION])
    ctx.options = call[_FIRST_OPTION:]


def _differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    output, statistics, *tensors = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    needs = needs_of(_Arguments, ctx)
    wanted = [needs.query, needs.key, needs.value, needs.attn_mask]
    query, key, value, mask = _first_backward(grad_output, grad_lse, *tensors, output, statistics, *ctx.options, wanted)
    return _Arguments(query=query, key=key, value=value, attn_mask=mask)


@functools.wraps(formula)
def _output_alone(*args: Any, **kwargs: Any) -> Tensor:
    return formula(*args, **kwargs)[0]


def _gradients(call: Any) -> tuple[Tensor | None, ...]:
    """What the backward operator returns; output and statistics are made anew, as they depend on the other inputs."""
    grads = (call.grad_output,) if call.grad_lse is None else (call.grad_output, call.grad_lse)

    def forward(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, ...]:
        varied = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
        return call_by_name(formula, call, **varied)[: len(grads)]

    return gradients_of(forward, (call.query, call.key, call.value, call.attn_mask), call.output_mask, grads)


def _cast(call: Any, device_type: str) -> Iterable[Any]:
    """Query, key and value take autocast's dtype; a mask keeps its own where the operator takes it."""
    dtype, mask = torch.get_autocast_dtype(device_type), call.attn_mask
    query, key, value = (cast_to(tensor, dtype, device_type) for tensor in (call.query, call.key, call.value))
    if mask is not None and mask.is_floating_point() and mask.dtype != query.dtype:
        mask = mask.to(torch.float32)
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


register_fake(_fake, _attention, _with_lse, _forward)
register_fake(_fake_backward, _backward)
register_autograd(_with_lse, _setup_context, _differentiate, composite=formula, forward=_forward)
register_autograd(_attention, _setup_context, _differentiate, composite=_output_alone, forward=_forward)
register_second_derivative(_backward, _gradients)
register_autocast(_attention, _cast)
register_autocast(_with_lse, _cast)
for _op in (_attention, _with_lse, _forward, _backward):
    register_vmap(_op)
