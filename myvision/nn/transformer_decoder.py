"""The decoder of a transformer as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from myvision._checks import check_tensor
from myvision.nn._leaf import Leaf
from myvision.nn._masks import is_causal_mask
from myvision.nn._transformer import TransformerLayer, add_norm
from myvision.nn.attention import KeyValueCache

LayerCache = tuple[KeyValueCache, KeyValueCache]


class TransformerDecoderLayer(TransformerLayer, nn.TransformerDecoderLayer):
    """Self-attention, attention to a memory and a feed-forward network, with fused attention and norms.

    A ``torch.nn.TransformerDecoderLayer`` in constructor, parameters, ``state_dict`` and arguments, with the same
    results; everything else is as for :class:`~myvision.nn.TransformerEncoderLayer`.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias: as in
            ``torch.nn.TransformerDecoderLayer``.
        device, dtype: likewise.

    Shape:
        - tgt: ``[batch, length, d_model]`` with ``batch_first``, else ``[length, batch, d_model]``, or
          ``[length, d_model]``.
        - memory: likewise, of the encoder's length.
        - tgt_mask, tgt_key_padding_mask, tgt_is_causal and memory_mask, memory_key_padding_mask, memory_is_causal:
          ``attn_mask``, ``key_padding_mask`` and ``is_causal`` of :class:`~myvision.nn.MultiheadAttention`.
        - cache: the caches of self-attention and of attention to the memory, see :class:`TransformerDecoder`.
        - output: as tgt.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import TransformerDecoderLayer
        >>> layer = TransformerDecoderLayer(512, 8, batch_first=True)
        >>> layer(torch.rand(2, 20, 512), torch.rand(2, 100, 512)).shape
        torch.Size([2, 20, 512])

    Papers: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_ and, for ``norm_first``, `On Layer
    Normalization in the Transformer Architecture <https://arxiv.org/abs/2002.04745>`_.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        options = layer_norm_eps, batch_first, norm_first, bias, device, dtype
        super().__init__(d_model, nhead, dim_feedforward, dropout, activation, *options)
        self._use_fused_modules()

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        cache: LayerCache | None = None,
    ) -> Tensor:
        check_tensor("tgt", tgt)
        check_tensor("memory", memory)
        if cache is not None and not (isinstance(cache, (tuple, list)) and len(cache) == 2):
            raise TypeError("cache must be a pair of KeyValueCache, of self-attention and of attention to the memory")
        own_cache, memory_cache = (None, None) if cache is None else cache

        masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        memory_masks = memory_mask, memory_key_padding_mask, memory_is_causal
        if self.norm_first:
            x, stream = add_norm(*self._attended(self.norm1(tgt), *masks, own_cache), tgt, self.norm2)
            x, stream = add_norm(*self._attended_memory(x, memory, *memory_masks, memory_cache), stream, self.norm3)
            return self._fed_forward_and_added(x, self.dropout3, stream)
        x, _ = add_norm(*self._attended(tgt, *masks, own_cache), tgt, self.norm1)
        x, _ = add_norm(*self._attended_memory(x, memory, *memory_masks, memory_cache), x, self.norm2)
        x, _ = add_norm(*self._fed_forward(x, self.dropout3), x, self.norm3)
        return x

    def _attended(
        self,
        x: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, nn.Module | None]:
        """What attention to the tokens themselves gives, and the dropout that is still to come."""
        if self._overrides("_sa_block"):
            _check_no_cache(cache, "_sa_block")
            return self._sa_block(x, mask, key_padding_mask, is_causal), None
        return _attend(self.self_attn, x, x, mask, key_padding_mask, is_causal, cache), self.dropout1

    def _attended_memory(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, nn.Module | None]:
        """What attention to the memory gives, and the dropout that is still to come."""
        if self._overrides("_mha_block"):
            _check_no_cache(cache, "_mha_block")
            return self._mha_block(x, memory, mask, key_padding_mask, is_causal), None
        return _attend(self.multihead_attn, x, memory, mask, key_padding_mask, is_causal, cache), self.dropout2


def _check_no_cache(cache: KeyValueCache | None, block: str) -> None:
    if cache is not None:
        raise RuntimeError(f"cache must be None where {block} is overridden, as it has no such argument")


def _attend(
    attention: nn.Module,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    cache: KeyValueCache | None,
) -> Tensor:
    options: dict[str, Any] = {"attn_mask": mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
    if cache is not None:  # torch's modules, which may stand here too, have none
        options["cache"] = cache
    return attention(x, memory, memory, need_weights=False, **options)[0]


class TransformerDecoder(Leaf, nn.TransformerDecoder):
    """A stack of decoder layers, which can decode step by step.

    A ``torch.nn.TransformerDecoder`` in constructor, parameters, ``state_dict`` and arguments.

    Args:
        decoder_layer: what is copied ``num_layers`` times, of :class:`TransformerDecoderLayer` or called like it.
        num_layers: how many layers.
        norm: applied at the end. Default: none.

    Shape:
        - tgt, memory, output and the masks: as for :class:`TransformerDecoderLayer`.
        - tgt_is_causal: as there. None, the default: on the CPU and outside of graphs, ``tgt_mask`` is looked at.
        - cache: of :meth:`new_cache`. Then ``tgt`` is only what has come since the call before. Each token sees itself
          and all before it, without a mask; neither the memory nor earlier tokens are projected again.

    Example::

        >>> import torch
        >>> from myvision.nn import TransformerDecoder, TransformerDecoderLayer
        >>> decoder = TransformerDecoder(TransformerDecoderLayer(512, 8, batch_first=True), num_layers=6).eval()
        >>> memory, tokens, cache = torch.rand(2, 100, 512), torch.rand(2, 20, 512), decoder.new_cache()
        >>> steps = [decoder(token, memory, cache=cache) for token in tokens.split(1, dim=1)]
        >>> torch.cat(steps, dim=1).shape
        torch.Size([2, 20, 512])

    Paper: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.
    """

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        cache: list[LayerCache] | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "tgt_is_causal": is_causal_mask(tgt_mask) if tgt_is_causal is None else tgt_is_causal,
            "memory_is_causal": memory_is_causal,
        }
        count = len(self.layers)
        if cache is not None and not (isinstance(cache, (tuple, list)) and len(cache) == count):
            raise TypeError(f"cache must be a list of {count} pairs, one for each layer, as new_cache() makes it")
        x = tgt
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, **options, **({} if cache is None else {"cache": cache[i]}))
        return x if self.norm is None else self.norm(x)

    def new_cache(self) -> list[LayerCache]:
        """An empty cache for one batch of sequences."""
        return [(KeyValueCache(), KeyValueCache()) for _ in self.layers]
