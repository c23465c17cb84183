"""The operators as functions."""

from myvision.ops.add_layer_norm import add_layer_norm
from myvision.ops.add_rms_norm import add_rms_norm
from myvision.ops.attention import scaled_dot_product_attention, varlen_attention
from myvision.ops.batch_norm import batch_norm
from myvision.ops.deform_conv2d import deform_conv2d
from myvision.ops.group_norm import group_norm
from myvision.ops.instance_norm import instance_norm
from myvision.ops.layer_norm import layer_norm
from myvision.ops.linear import linear
from myvision.ops.my_add import my_add
from myvision.ops.rms_norm import rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "deform_conv2d",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "my_add",
    "rms_norm",
    "scaled_dot_product_attention",
    "varlen_attention",
]
