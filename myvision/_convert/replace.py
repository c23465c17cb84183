"""Modules of torch and torchvision become ours by their class alone: parameters, buffers and hooks stay as they are."""

from __future__ import annotations

import sys

from torch import nn

import myvision.nn as ours

ALIKE = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
)


def replacements() -> dict[type[nn.Module], type[nn.Module]]:
    """Our class for each that it can stand in for. Of packages that nobody has imported no model has a module."""
    found: dict[type[nn.Module], type[nn.Module]] = {getattr(nn, name): getattr(ours, name) for name in ALIKE}
    if "torchvision.ops" in sys.modules:
        from torchvision import ops

        found[ops.DeformConv2d] = ours.DeformConv2d
        found[ops.FrozenBatchNorm2d] = ours.FrozenBatchNorm2d
    if "torchvision.models.convnext" in sys.modules:
        from torchvision.models.convnext import LayerNorm2d

        found[LayerNorm2d] = ours.LayerNorm2d
    return found


def replace(model: nn.Module) -> None:
    """Makes modules ours whose class is exactly one that we know: a subclass may do anything."""
    known = replacements()
    for module in model.modules():
        module.__class__ = known.get(type(module), type(module))
