"""The operators as modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from myvision.nn.my_add import MyAdd

if TYPE_CHECKING:
    from myvision.nn.deform_conv2d import DeformConv2d, DeformConv2dPack

__all__ = ["DeformConv2d", "DeformConv2dPack", "MyAdd"]


def __getattr__(name: str) -> Any:
    """Loads the modules that subclass torchvision's on first use: importing torchvision takes as long as torch."""
    if name in __all__:
        from myvision.nn import deform_conv2d

        return getattr(deform_conv2d, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
