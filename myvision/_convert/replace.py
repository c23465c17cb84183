"""Modules of torch and torchvision become ours by their class alone: parameters, buffers and hooks stay as they are."""

from __future__ import annotations

import sys

from torch import Tensor, nn

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
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
)


class ChannelsLastNorm2d(ours.LayerNorm):
    """torchvision's norm over the channels of images, whose output lies in channels_last whatever the input does.

    What follows in the network is laid out likewise, and faster for it.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def replacements() -> dict[type[nn.Module], type[nn.Module]]:
    """Our class for each that it can stand in for. Of packages that nobody has imported no model has a module."""
    found: dict[type[nn.Module], type[nn.Module]] = {getattr(nn, name): getattr(ours, name) for name in ALIKE}
    if "torchvision.ops" in sys.modules:
        from torchvision import ops

        found[ops.DeformConv2d] = ours.DeformConv2d
        found[ops.FrozenBatchNorm2d] = ours.FrozenBatchNorm2d
    if "torchvision.models.convnext" in sys.modules:
        from torchvision.models.convnext import LayerNorm2d

        found[LayerNorm2d] = ChannelsLastNorm2d
    return found


def replace(model: nn.Module) -> None:
    """Makes modules ours whose class is exactly one that we know: a subclass may do anything."""
    known = replacements()
    for module in model.modules():
        module.__class__ = known.get(type(module), type(module))
