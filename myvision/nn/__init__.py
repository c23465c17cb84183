"""The operators as modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from myvision.nn.add_layer_norm import AddLayerNorm
from myvision.nn.add_rms_norm import AddRMSNorm
from myvision.nn.attention import KeyValueCache, MultiheadAttention
from myvision.nn.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
)
from myvision.nn.group_norm import GroupNorm, GroupNormAct
from myvision.nn.instance_norm import (
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    InstanceNormAct1d,
    InstanceNormAct2d,
    InstanceNormAct3d,
)
from myvision.nn.layer_norm import LayerNorm, LayerNorm2d, LayerNormAct
from myvision.nn.linear import Linear, LinearAct
from myvision.nn.my_add import MyAdd
from myvision.nn.rms_norm import RMSNorm, RMSNorm2d, RMSNormAct
from myvision.nn.sync_batch_norm import SyncBatchNorm, SyncBatchNormAct
from myvision.nn.transformer import Transformer
from myvision.nn.transformer_decoder import TransformerDecoder, TransformerDecoderLayer
from myvision.nn.transformer_encoder import TransformerEncoder, TransformerEncoderLayer

if TYPE_CHECKING:
    from myvision.nn.deform_conv2d import DeformConv2d, DeformConv2dPack
    from myvision.nn.frozen_batch_norm import FrozenBatchNorm2d, FrozenBatchNormAct2d

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "DeformConv2d",
    "DeformConv2dPack",
    "FrozenBatchNorm2d",
    "FrozenBatchNormAct2d",
    "GroupNorm",
    "GroupNormAct",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "InstanceNormAct1d",
    "InstanceNormAct2d",
    "InstanceNormAct3d",
    "KeyValueCache",
    "LayerNorm",
    "LayerNorm2d",
    "LayerNormAct",
    "Linear",
    "LinearAct",
    "MultiheadAttention",
    "MyAdd",
    "RMSNorm",
    "RMSNorm2d",
    "RMSNormAct",
    "SyncBatchNorm",
    "SyncBatchNormAct",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

_SUBCLASSES_OF_TORCHVISION = {
    "DeformConv2d": "deform_conv2d",
    "DeformConv2dPack": "deform_conv2d",
    "FrozenBatchNorm2d": "frozen_batch_norm",
    "FrozenBatchNormAct2d": "frozen_batch_norm",
}


def __getattr__(name: str) -> Any:
    """Loads the modules that subclass torchvision's on first use: importing torchvision takes as long as torch."""
    if name in _SUBCLASSES_OF_TORCHVISION:
        return getattr(import_module(f"myvision.nn.{_SUBCLASSES_OF_TORCHVISION[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
