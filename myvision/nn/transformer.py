"""The transformer of encoder and decoder as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from myvision.nn._leaf import Leaf
from myvision.nn.layer_norm import LayerNorm
from myvision.nn.transformer_decoder import TransformerDecoder, TransformerDecoderLayer
from myvision.nn.transformer_encoder import TransformerEncoder, TransformerEncoderLayer


class Transformer(Leaf, nn.Transformer):
    """An encoder and a decoder, with fused attention and norms.

    A ``torch.nn.Transformer`` in constructor, parameters, ``state_dict`` and arguments, with the same results in
    training, in evaluation and without gradients; :class:`~myvision.nn.MultiheadAttention` says where it differs.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation: as in
            ``torch.nn.Transformer``.
        custom_encoder, custom_decoder, layer_norm_eps, batch_first, norm_first, bias, device, dtype: likewise.

    Shape:
        - src, tgt: ``[batch, length, d_model]`` with ``batch_first``, else ``[length, batch, d_model]``, or
          ``[length, d_model]``.
        - src_mask, src_key_padding_mask, src_is_causal: as for :class:`~myvision.nn.TransformerEncoder`.
        - tgt_mask, tgt_key_padding_mask, tgt_is_causal and memory_mask, memory_key_padding_mask, memory_is_causal: as
          for :class:`~myvision.nn.TransformerDecoder`, which also decodes step by step.
        - output: as tgt.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import Transformer
        >>> model = Transformer(512, 8, batch_first=True)
        >>> causal = model.generate_square_subsequent_mask(20)
        >>> model(torch.rand(2, 100, 512), torch.rand(2, 20, 512), tgt_mask=causal).shape
        torch.Size([2, 20, 512])

    Paper: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = d_model, nhead, dim_feedforward, dropout, activation
        options = layer_norm_eps, batch_first, norm_first, bias
        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(*shape, *options, **place)
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, **place)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm)
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*shape, *options, **place)
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, **place)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm)
        super().__init__(
            d_model,
            nhead,
            num_encoder_layers,
            num_decoder_layers,
            dim_feedforward,
            dropout,
            activation,
            custom_encoder,
            custom_decoder,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
