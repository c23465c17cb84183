"""Attention in ONNX: its own node, with a mask made of the options, or the formula where that node cannot say it."""

from __future__ import annotations

import math
from typing import Any

import torch

from myvision.onnx._graph import Opset, UnsupportedError, Value, constant, real


def attention(op: Opset, **arguments: Any) -> Value:
    translation = _Attention(op, **arguments)
    is_node = op.version >= 23 and translation.has_a_scale_of_nodes and not translation.caps_a_mask
    return translation.node() if is_node else translation.formula()[0]


def attention_with_lse(op: Opset, **arguments: Any) -> tuple[Value, Value]:
    return _Attention(op, **arguments).formula()


class _Attention:
    """One call of the operator."""

    def __init__(
        self,
        op: Opset,
        *,
        query: Value,
        key: Value,
        value: Value,
        attn_mask: Value,
        alibi_slopes: Value,
        cu_seqlens_q: Value,
        cu_seqlens_k: Value,
        seed: Value,
        dropout_p: float,
        is_causal: bool,
        causal_alignment: str,
        window_left: int | None,
        window_right: int | None,
        scale: float | None,
        softcap: float,
    ) -> None:
        if cu_seqlens_q is not None:
            raise UnsupportedError("varlen_attention has no form in ONNX: use scaled_dot_product_attention with a mask")
        if dropout_p:
            raise UnsupportedError("attention with dropout has no form in ONNX: export with dropout_p=0")
        self.op = op
        self.query, self.key, self.value = query, key, value
        self.mask, self.slopes = attn_mask, alibi_slopes
        self.is_causal, self.bottom_right = is_causal, causal_alignment == "bottom_right"
        self.window_left, self.window_right = window_left, window_right
        self.scale = 1 / math.sqrt(max(int(query.shape[3]), 1)) if scale is None else scale
        self.softcap = softcap

    @property
    def has_a_scale_of_nodes(self) -> bool:
        """ONNX's node takes a positive scale only, as it multiplies by its square root, and keeps it in float32."""
        limits = torch.finfo(torch.float32)
        return limits.tiny <= self.scale <= limits.max

    @property
    def caps_a_mask(self) -> bool:
        """ONNX's node caps the scores after the mask, which would then not mask any more."""
        has_mask = self.mask is not None or self.slopes is not None or self.is_causal
        return self.softcap > 0 and (has_mask or self.window_left is not None or self.window_right is not None)

    @property
    def has_distances(self) -> bool:
        """Whether there is more than a mask and torch's own causal order."""
        windowed = self.window_left is not None or self.window_right is not None
        return self.slopes is not None or windowed or (self.is_causal and self.bottom_right)

    def node(self) -> Value:
        causal = self.is_causal and not self.has_distances
        output, *_ = self.op.Attention(
            self.query,
            self.key,
            self.value,
            self._bias() if self.has_distances else self._mask_of_node(),
            is_causal=int(causal),
            scale=self.scale,
            softcap=self.softcap,
        )
        return output

    def formula(self) -> tuple[Value, Value]:
        """Output and lse. Half types are computed in float32."""
        op = self.op
        heads, key_heads = int(self.query.shape[1]), int(self.key.shape[1])
        grouped = op.Constant(value_ints=[0, key_heads, heads // key_heads, -1, int(self.query.shape[3])])
        query = op.Reshape(real(self.op, self.query), grouped)
        one = op.Constant(value_ints=[2])
        key, value = (op.Unsqueeze(real(op, rows), one) for rows in (self.key, self.value))
        scores = op.MatMul(op.Mul(query, constant(op, self.scale, query)), op.Transpose(key, perm=[0, 1, 2, 4, 3]))
        if self.softcap:
            cap = constant(op, self.softcap, scores)
            scores = op.Mul(cap, op.Tanh(op.Div(scores, cap)))
        lengths = op.Concat(self._length(self.query), self._length(self.key), axis=0)
        flat = op.Concat(op.Constant(value_ints=[0, heads]), lengths, axis=0)
        scores = op.Reshape(scores, flat)
        if self.has_distances or self.is_causal or self.mask is not None:
            scores = op.Add(scores, op.CastLike(self._bias(), scores))
        weights = op.Softmax(scores, axis=-1)
        split = op.Concat(op.Constant(value_ints=[0, key_heads, heads // key_heads]), lengths, axis=0)
        output = op.MatMul(op.Reshape(weights, split), value)
        width = op.Constant(value_ints=[int(self.value.shape[3])])
        shape = op.Concat(op.Constant(value_ints=[0, heads]), self._length(self.query), width, axis=0)
        lse = op.ReduceLogSumExp(scores, op.Constant(value_ints=[-1]), keepdims=0)
        return op.CastLike(op.Reshape(output, shape), self.query), lse

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _mask_of_node(self) -> Value:
        if self.mask is None:
            return None
        mask = self.mask if self.mask.dtype.name == "BOOL" else self.op.CastLike(self.mask, self.query)
        if len(self.mask.shape) >= 2 and 1 not in self.mask.shape[-2:]:
            return mask
        # onnxruntime takes masks that are repeated along batch and heads only.
        return self.op.Expand(mask, self.op.Concat(self._length(self.query), self._length(self.key), axis=0))

    def _bias(self) -> Value:
        """What is added to the scores: the mask, the slopes, and -inf where a key is not seen."""
        op = self.op
        like = real(self.op, self.query)
        distance, bias = self._distance(), None
        if self.slopes is not None:
            slopes = op.CastLike(op.Unsqueeze(self.slopes, op.Constant(value_ints=[-2, -1])), like)
            bias = op.Neg(op.Mul(slopes, op.CastLike(op.Abs(distance), like)))
        right = 0 if self.is_causal else self.window_right
        visible = []
        if right is not None:
            visible.append(op.LessOrEqual(distance, op.Constant(value_int=right)))
        if self.window_left is not None:
            visible.append(op.GreaterOrEqual(distance, op.Constant(value_int=-self.window_left)))
        if self.mask is not None and self.mask.dtype.name == "BOOL":
            visible.append(self.mask)
        elif self.mask is not None:
            mask = op.CastLike(self.mask, like)
            bias = mask if bias is None else op.Add(bias, mask)
        for seen in visible:
            hidden = op.Where(seen, constant(self.op, 0.0, like), constant(self.op, -math.inf, like))
            bias = hidden if bias is None else op.Add(bias, hidden)
        return op.CastLike(bias, self.query)

    def _distance(self) -> Value:
        """j - i - shift, [queries, keys]."""
        op = self.op
        squeeze = op.Constant(value_ints=[0])
        queries, keys = (op.Squeeze(self._length(rows), squeeze) for rows in (self.query, self.key))
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        i, j = op.Range(zero, queries, one), op.Range(zero, keys, one)
        if self.bottom_right:
            i = op.Add(i, op.Sub(keys, queries))
        return op.Sub(op.Unsqueeze(j, op.Constant(value_ints=[0])), op.Unsqueeze(i, op.Constant(value_ints=[1])))

    def _length(self, rows: Value) -> Value:
        return self.op.Shape(rows, start=2, end=3)


TRANSLATIONS = {
    torch.ops.myvision.attention.default: attention,
    torch.ops.myvision.attention.with_lse: attention_with_lse,
}
