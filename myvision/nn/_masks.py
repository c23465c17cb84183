"""The masks of torch's attention modules, where True means hidden, as the operator takes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from myvision._checks import check_tensor
from myvision._dispatch.tracing import is_tracing


def check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raises unless the mask, if there is one, is bool or floating and has one of the shapes."""
    if mask is None:
        return
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        dtype = str(mask.dtype).removeprefix("torch.")
        raise RuntimeError(f"{name} must be bool, where True hides a key, or floating, but has dtype {dtype}")
    if all(mask.shape != shape for shape in shapes):
        wanted = " or ".join(map(str, shapes))
        raise RuntimeError(f"{name} must have shape {wanted}, but has shape {tuple(mask.shape)}")


def check_mask_dtype(mask: Tensor | None, query: Tensor) -> None:
    """What the operator takes, for where plain torch would take more; autocast casts the others."""
    if mask is None or mask.dtype in (torch.bool, torch.float32, query.dtype):
        return
    if not torch.is_autocast_enabled(query.device.type):
        dtype, wanted = (str(tensor.dtype).removeprefix("torch.") for tensor in (mask, query))
        raise RuntimeError(
            f"attn_mask and key_padding_mask must have dtype bool, float32 or that of query, {wanted}, but have {dtype}"
        )


def merge_masks(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """One mask for the operator: bool, where True means seen, or to be added to the scores.

    Args:
        attn_mask: ``[1 or batch, 1 or heads, queries, keys]``, bool (True: hidden) or floating.
        key_padding_mask: ``[batch, 1, 1, keys]``, likewise.
    """
    if attn_mask is None or key_padding_mask is None:
        mask = key_padding_mask if attn_mask is None else attn_mask
        return ~mask if mask is not None and mask.dtype == torch.bool else mask
    if attn_mask.dtype == key_padding_mask.dtype == torch.bool:
        return ~(attn_mask | key_padding_mask)
    if attn_mask.dtype == torch.bool:
        return key_padding_mask.masked_fill(attn_mask, -math.inf)
    if key_padding_mask.dtype == torch.bool:
        return attn_mask.masked_fill(key_padding_mask, -math.inf)
    return attn_mask + key_padding_mask


def is_causal_mask(mask: Tensor | None) -> bool:
    """Whether a mask is found to be the causal one, of which the operator then computes half.

    It is read only in plain eager mode on the CPU: a graph cannot ask, and a GPU would have to be waited for. A mask
    that needs a gradient is never taken for it.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad:
        return False
    if torch.compiler.is_compiling() or is_tracing() or type(mask) is not Tensor or not mask.is_cpu:
        return False
    return torch.equal(mask, nn.Transformer.generate_square_subsequent_mask(mask.shape[0], dtype=mask.dtype))
