"""The operators as functions."""

from myvision.ops.deform_conv2d import deform_conv2d
from myvision.ops.my_add import my_add

__all__ = ["deform_conv2d", "my_add"]
