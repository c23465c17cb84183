"""The operators as modules."""

from importlib.util import find_spec

from myvision.nn.my_add import MyAdd

__all__ = ["DeformConv2d", "DeformConv2dPack", "MyAdd"]

if find_spec("myvision.nn.deform_conv2d"):
    from myvision.nn.deform_conv2d import DeformConv2d, DeformConv2dPack
