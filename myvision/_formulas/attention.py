"""Attention in plain torch, with every score in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from myvision._formulas._dropout import philox
from myvision._formulas._normalise import real


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    causal_alignment: str,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """What ``torch.ops.myvision.attention.with_lse`` computes: the output, and the log of the sum of exponentials.

    Where masked keys or values are not finite, the operator ignores them; this formula does not.
    """
    right = 0 if is_causal else window_right
    window = (window_left, right, causal_alignment == "bottom_right")
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    if cu_seqlens_q is None or cu_seqlens_k is None:
        rows = torch.arange(query.shape[:-1].numel(), device=query.device).reshape(query.shape[:-1])
        keep = _kept(rows, key.shape[-2], key.shape[-2], dropout_p, seed)
        slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
        return _attention(query, key, value, attn_mask, slopes, keep, dropout_p, window, scale, softcap)
    outputs, lses = [], []
    all_rows = torch.arange(query.shape[0] * query.shape[1], device=query.device).reshape(query.shape[1], -1)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        q, k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        keep = _kept(all_rows[:, q], k.stop - k.start, key.shape[0], dropout_p, seed)
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]
        slopes = None if slopes is None else slopes[:, None, None]
        sequence = (query[q].transpose(0, 1), key[k].transpose(0, 1), value[k].transpose(0, 1))
        output, lse = _attention(*sequence, None, slopes, keep, dropout_p, window, scale, softcap)
        outputs.append(output.transpose(0, 1))
        lses.append(lse)
    empty = value.new_empty(0, query.shape[1], value.shape[2]), real(query).new_empty(query.shape[1], 0)
    return torch.cat([*outputs, empty[0]]), torch.cat([*lses, empty[1]], dim=-1)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    keep: Tensor | None,
    dropout_p: float,
    window: tuple[int | None, int | None, bool],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Of ``[..., heads, length, width]``."""
    groups = query.shape[-3] // max(key.shape[-3], 1)
    q, k, v = real(query), real(key).repeat_interleave(groups, -3), real(value).repeat_interleave(groups, -3)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    left, right, bottom_right = window
    queries, keys = scores.shape[-2:]
    shift = keys - queries if bottom_right else 0
    i, j = torch.arange(queries, device=q.device)[:, None], torch.arange(keys, device=q.device)
    distance = j - i - shift
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype) * distance.abs()
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask != -math.inf)
        scores = scores + mask.to(scores.dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    sees = visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~sees, 0.0), -1).masked_fill(~sees, 0.0)
    lse = _logsumexp(scores.masked_fill(~sees, 0.0)) if keys else scores.sum(-1, keepdim=True)
    if keep is not None:
        weights = weights * keep * (0.0 if dropout_p == 1 else 1 / (1 - dropout_p))
    return (weights @ v).to(query.dtype), lse.masked_fill(~sees, -math.inf).squeeze(-1)


def _logsumexp(scores: Tensor) -> Tensor:
    """Over the last dimension; torch's derivative, exp(scores - result), loses the logarithm beside large scores."""
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    return peak + (scores - peak).exp().sum(-1, keepdim=True).log()


def _kept(rows: Tensor, keys: int, counted_keys: int, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    """Which probabilities dropout keeps, ``[*rows.shape, keys]``; each row counts from its own number."""
    if seed is None or dropout_p == 0:
        return None
    key = torch.arange(keys, device=rows.device)
    counter = rows[..., None] * ((counted_keys + 3) // 4) + key // 4
    words = torch.stack(philox(seed.reshape(()), counter), dim=-1)
    word = words.gather(-1, (key % 4).expand_as(counter).unsqueeze(-1)).squeeze(-1)
    return word >= int(dropout_p * 2**32)
