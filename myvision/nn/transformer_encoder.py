"""The encoder of a transformer as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from myvision._checks import check_tensor
from myvision.nn._leaf import Leaf
from myvision.nn._masks import is_causal_mask
from myvision.nn._transformer import TransformerLayer, add_norm


class TransformerEncoderLayer(TransformerLayer, nn.TransformerEncoderLayer):
    """Self-attention and a feed-forward network, with :class:`~myvision.nn.MultiheadAttention` and fused norms.

    A ``torch.nn.TransformerEncoderLayer`` in constructor, parameters, ``state_dict`` and arguments, with the same
    results in training, in evaluation and without gradients. Dropout, addition and norm are one pass over memory
    (:func:`myvision.ops.add_layer_norm`), and so are a linear layer and the activation and the dropout behind it
    (:func:`myvision.ops.linear`). Hooks, replaced submodules, linear layers of other classes, a ``forward`` set on one
    of them, and ``_sa_block`` and ``_ff_block`` of a subclass are honoured.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias: as in
            ``torch.nn.TransformerEncoderLayer``.
        device, dtype: likewise.

    Shape:
        - src: ``[batch, length, d_model]`` with ``batch_first``, else ``[length, batch, d_model]``, or
          ``[length, d_model]``.
        - src_mask, src_key_padding_mask, is_causal: ``attn_mask``, ``key_padding_mask`` and ``is_causal`` of
          :class:`~myvision.nn.MultiheadAttention`.
        - output: as src, also where there is padding.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import TransformerEncoderLayer
        >>> layer = TransformerEncoderLayer(768, 12, batch_first=True)
        >>> layer(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])

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
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        check_tensor("src", src)
        masks = src_mask, src_key_padding_mask, is_causal
        if self.norm_first:
            x, stream = add_norm(*self._attended(self.norm1(src), *masks), src, self.norm2)
            return self._fed_forward_and_added(x, self.dropout2, stream)
        x, _ = add_norm(*self._attended(src, *masks), src, self.norm1)
        x, _ = add_norm(*self._fed_forward(x, self.dropout2), x, self.norm2)
        return x

    def _attended(
        self, x: Tensor, mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, nn.Module | None]:
        """What attention gives, and the dropout that is still to come."""
        if self._overrides("_sa_block"):
            return self._sa_block(x, mask, key_padding_mask, is_causal=is_causal), None
        masks: dict[str, Any] = {"attn_mask": mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self.self_attn(x, x, x, need_weights=False, **masks)[0], self.dropout1

    @property
    def activation_relu_or_gelu(self) -> int:
        """0, whatever torch's constructor sets, or torch's TransformerEncoder would hand this layer nested tensors."""
        return 0

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        pass


class TransformerEncoder(Leaf, nn.TransformerEncoder):
    """A stack of encoder layers.

    A ``torch.nn.TransformerEncoder`` in constructor, parameters, ``state_dict`` and arguments. The output always has
    the shape of the input: padding is masked and never cut off.

    Args:
        encoder_layer: what is copied ``num_layers`` times, of :class:`TransformerEncoderLayer` or called like it.
        num_layers: how many layers.
        norm: applied at the end. Default: none.
        enable_nested_tensor, mask_check: have no effect; they are there to stand in for torch's class.

    Shape:
        - src, mask, src_key_padding_mask, output: as for :class:`TransformerEncoderLayer`.
        - is_causal: as there. None, the default: on the CPU and outside of graphs, ``mask`` is looked at.

    Example::

        >>> import torch
        >>> from myvision.nn import TransformerEncoder, TransformerEncoderLayer
        >>> encoder = TransformerEncoder(TransformerEncoderLayer(512, 8, batch_first=True), num_layers=6)
        >>> padding = torch.arange(100) >= torch.tensor([[90], [70]])
        >>> encoder(torch.rand(2, 100, 512), src_key_padding_mask=padding).shape
        torch.Size([2, 100, 512])

    Paper: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.
    """

    def __init__(
        self,
        encoder_layer: nn.TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)
        self.enable_nested_tensor = enable_nested_tensor

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        is_causal = is_causal_mask(mask) if is_causal is None else is_causal
        x = src
        for layer in self.layers:
            x = layer(x, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal)
        return x if self.norm is None else self.norm(x)
