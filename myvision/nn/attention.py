"""Multi-head attention as a module."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myvision._checks import check_tensor
from myvision.nn._fold import linear_step
from myvision.nn._leaf import Leaf
from myvision.nn._masks import check_mask, check_mask_dtype, merge_masks
from myvision.nn._project import project
from myvision.ops.attention import Alignment, scaled_dot_product_attention


class KeyValueCache:
    """What a :class:`MultiheadAttention` has projected of keys and values, ``[batch, heads, length, width]`` each.

    It starts empty. Self-attention appends the tokens of each call to it; attention to another sequence fills it in the
    first call and reads it in the later ones. It serves one module and one batch of sequences: the batch size must stay
    the same, and so must that other sequence, which is not read again. Begin a new one for another batch.

    Example::

        >>> import torch
        >>> from myvision.nn import KeyValueCache, MultiheadAttention
        >>> attention, cache = MultiheadAttention(512, 8, batch_first=True).eval(), KeyValueCache()
        >>> tokens = torch.rand(2, 20, 512)
        >>> steps = [attention(t, t, t, need_weights=False, cache=cache)[0] for t in tokens.split(1, dim=1)]
        >>> cache.key.shape
        torch.Size([2, 8, 20, 64])
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all keys and values there are now."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        self.key, self.value = key, value
        return key, value


class MultiheadAttention(Leaf, nn.MultiheadAttention):
    """Multi-head attention by the fused kernel of :func:`myvision.ops.scaled_dot_product_attention`.

    A ``torch.nn.MultiheadAttention`` in constructor, parameters, ``state_dict`` and arguments, with the same results in
    training, in evaluation and without gradients. It differs where torch's own ways differ from each other:

    - A query that sees no key gets 0 (then the bias of the output projection), never NaN.
    - Wrongly shaped masks raise, and so does ``is_causal`` without ``attn_mask``, in evaluation too.
    - Nested tensors are refused: pass padded ones with ``key_padding_mask``.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            ``torch.nn.MultiheadAttention``.

    Shape:
        - query: ``[batch, queries, embed_dim]`` with ``batch_first``, else ``[queries, batch, embed_dim]``, or
          ``[queries, embed_dim]``. Key and value likewise, ``kdim`` and ``vdim`` wide.
        - key_padding_mask: ``[batch, keys]``, or ``[keys]`` without a batch: bool, where True hides a key, or floating,
          to be added to the scores.
        - attn_mask: ``[queries, keys]`` or ``[batch * num_heads, queries, keys]``, likewise. Both masks are merged, the
          first form for all heads at once; with ``is_causal`` they need not be.
        - is_causal: a hint that ``attn_mask``, which must be given, is the causal mask: it is not read then, and half
          the work is saved. With ``need_weights``, ``add_bias_kv`` or ``add_zero_attn`` the mask is read all the same.
        - need_weights: return the weights too, ``[batch, queries, keys]``, or with ``average_attn_weights=False``
          ``[batch, num_heads, queries, keys]``. They are computed by plain torch, with all scores in memory: pass False
          for the fused kernel.
        - cache: keys and values of earlier calls, for decoding step by step. In self-attention (``key is query``) each
          query then sees, unless ``attn_mask`` says otherwise, itself and all tokens before it; masks cover the
          cached tokens too.
        - output: a tuple of the attention's output, as query, and the weights or None.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import MultiheadAttention
        >>> attention = MultiheadAttention(512, 8, batch_first=True)
        >>> tokens, padding = torch.rand(2, 100, 512), torch.arange(100) >= torch.tensor([[100], [70]])
        >>> attended, _ = attention(tokens, tokens, tokens, key_padding_mask=padding, need_weights=False)

    Paper: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_inputs(query, key, value, cache)
        is_batched, is_step = query.dim() == 3, cache is not None and query is key
        q, k, v = self._heads(query, key, value, cache)
        if is_step and attn_mask is None:
            attn_mask, is_causal = _hidden_from_step(q, k), True
        self._check_masks(attn_mask, key_padding_mask, is_causal, q, k, is_batched)

        has_extra_keys = self.bias_k is not None or self.add_zero_attn
        is_causal = is_causal and not need_weights and not has_extra_keys
        mask = _merged(None if is_causal else attn_mask, key_padding_mask, *q.shape[:2])
        check_mask_dtype(mask, q)
        if has_extra_keys:
            k, v, mask = self._with_extra_keys(k, v, mask)

        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = F.dropout(_weights(q, k, mask), dropout_p)
            output = weights @ v
        else:
            alignment: Alignment = "bottom_right" if is_step else "top_left"
            output = scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, causal_alignment=alignment)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        output = linear_step(self.out_proj, self._joined(output, is_batched))
        return output, weights if weights is None or is_batched else weights.squeeze(0)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None) -> None:
        widths = self.embed_dim, self.kdim, self.vdim
        for name, tensor, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
            check_tensor(name, tensor)
            if tensor.is_nested:
                raise RuntimeError(f"{name} is a nested tensor; pass a padded one, with key_padding_mask")
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim() or tensor.shape[-1] != width:
                order = "batch, length" if self.batch_first else "length, batch"
                raise RuntimeError(
                    f"{name} must have shape [{order}, {width}], or [length, {width}] where no input has a batch, "
                    f"but has shape {tuple(tensor.shape)}"
                )
        batch = 0 if self.batch_first else 1
        fits = query.dim() == 2 or query.shape[batch] == key.shape[batch]
        if not fits or key.shape[:-1] != value.shape[:-1]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise RuntimeError(
                "query, key and value must have the same batch size, key and value also the same length, "
                f"but have shapes {shapes}"
            )
        if cache is not None:
            _check_cache(cache, query.shape[batch] if query.dim() == 3 else 1)

    def _check_masks(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        q: Tensor,
        k: Tensor,
        is_batched: bool,
    ) -> None:
        batch, heads, queries, _ = q.shape
        keys = k.shape[2]
        check_mask("attn_mask", attn_mask, (queries, keys), (batch * heads, queries, keys))
        check_mask("key_padding_mask", key_padding_mask, (batch, keys) if is_batched else (keys,))
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal is a hint that attn_mask is the causal mask, but attn_mask is None; "
                "torch.nn.Transformer.generate_square_subsequent_mask(length) makes one"
            )

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projects the inputs into ``[batch, heads, length, width]``; keys and values are all that the cache has."""
        is_batched = query.dim() == 3
        if cache is not None and cache.key is not None and cache.value is not None and query is not key:
            return self._split(self._projected_query(query), is_batched), cache.key, cache.value
        q, k, v = (self._split(tensor, is_batched) for tensor in self._projected(query, key, value))
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Projects the inputs, those that are the same tensor by one product."""
        counts = [1, 1, 1]
        if self.in_proj_weight is not None and key is value:
            counts = [3] if query is key else [1, 2]
        sizes = [count * self.embed_dim for count in counts]
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.split(sizes)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        return [
            part
            for input, weight, bias, count in zip((query, key, value), weights, biases, counts, strict=False)
            for part in project(input, weight, bias).chunk(count, dim=-1)
        ]

    def _projected_query(self, query: Tensor) -> Tensor:
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[: self.embed_dim]
        return project(query, weight, None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim])

    def _split(self, projected: Tensor, is_batched: bool) -> Tensor:
        """Views a projection as heads: ``[batch, heads, length, width]``."""
        heads = projected.unflatten(-1, (self.num_heads, self.head_dim))
        if not is_batched:
            return heads.transpose(0, 1).unsqueeze(0)
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _joined(self, output: Tensor, is_batched: bool) -> Tensor:
        """Joins heads into the layout of the module's input."""
        if not is_batched:
            return output.squeeze(0).transpose(0, 1).flatten(1)
        return (output.transpose(1, 2) if self.batch_first else output.permute(2, 0, 1, 3)).flatten(2)

    def _with_extra_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Appends the keys and values of ``add_bias_kv`` and ``add_zero_attn``, which every query sees."""
        batch, heads, keys, width = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.view(1, heads, 1, width).expand(batch, -1, -1, -1)], dim=2)
            v = torch.cat([v, self.bias_v.view(1, heads, 1, width).expand(batch, -1, -1, -1)], dim=2)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[2] - keys), value=float(mask.dtype == torch.bool))
        return k, v, mask


def _check_cache(cache: KeyValueCache, batch: int) -> None:
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"cache must be a KeyValueCache, but got {type(cache).__name__}")
    if cache.key is not None and cache.key.shape[0] != batch:
        raise RuntimeError(
            f"cache holds keys of batch size {cache.key.shape[0]}, but query has {batch}; begin a new KeyValueCache"
        )


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int) -> Tensor | None:
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (batch, heads))
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(batch, 1, 1, key_padding_mask.shape[-1])
    return merge_masks(attn_mask, key_padding_mask)


def _hidden_from_step(q: Tensor, k: Tensor) -> Tensor:
    """The mask that is causal where the last query stands beside the last key; True means hidden."""
    queries, keys = q.shape[2], k.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The probabilities, in plain torch; 0 in rows without a key to see."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is None:
        return scores.softmax(-1)
    is_bool = mask.dtype == torch.bool
    hidden = ~mask if is_bool else mask == -math.inf
    scores = scores.masked_fill(hidden, -math.inf) if is_bool else scores + mask
    sees_none = hidden.all(-1, keepdim=True)
    return scores.masked_fill(sees_none, 0).softmax(-1).masked_fill(sees_none, 0).to(q.dtype)
