"""Deformable convolution as modules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from myvision._checks import pair
from myvision.nn._leaf import Leaf
from myvision.ops.deform_conv2d import check_word, deform_conv2d, pad_by_word

Size = int | tuple[int, int]
Padding = Size | Literal["same", "valid"]


class _DeformConv2d(nn.Module):
    """The parameters of ``torchvision.ops.DeformConv2d``, for where torchvision does not import."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"in_channels ({in_channels}) and out_channels ({out_channels}) must be multiples of groups ({groups})"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = pair(kernel_size)
        self.stride = pair(stride)
        self.padding = pair(padding)
        self.dilation = pair(dilation)
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)

    def __repr__(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        text += f", padding={self.padding}" if self.padding != (0, 0) else ""
        text += f", dilation={self.dilation}" if self.dilation != (1, 1) else ""
        text += f", groups={self.groups}" if self.groups != 1 else ""
        text += ", bias=False" if self.bias is None else ""
        return f"{type(self).__name__}({text})"


if TYPE_CHECKING:
    _Base = _DeformConv2d
else:
    try:
        from torchvision.ops import DeformConv2d as _Base
    except Exception:  # torchvision is optional, and one made for another torch fails in many ways
        _Base = _DeformConv2d


class DeformConv2d(Leaf, _Base):
    """Deformable convolution, see :func:`myvision.ops.deform_conv2d`.

    A ``torchvision.ops.DeformConv2d`` where torchvision is installed, and the same in every respect where it is not:
    constructor, parameters, their initial values, ``repr`` and ``state_dict``.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number or (height, width).
        stride: step between samples. Default: 1.
        padding: zeros around the image, ``"same"`` or ``"valid"``. Default: 0.
        dilation: distance between the taps. Default: 1.
        groups: groups of channels that do not mix. Default: 1.
        bias: whether to add a bias. Default: True.

    Shape:
        - input: ``[batch, in_channels, height, width]``, of float64, float32, float16 or bfloat16, as the parameters
          (under autocast they may differ).
        - offset: ``[batch, 2 * offset_groups * kernel_height * kernel_width, out_height, out_width]``, of the same
          dtype, or of float32 beside a half type.
        - mask: ``[batch, offset_groups * kernel_height * kernel_width, out_height, out_width]``, or None.
        - output: ``[batch, out_channels, out_height, out_width]``.

    Raises:
        ValueError: channels are no multiple of groups, or ``padding="same"`` comes with a stride.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import DeformConv2d
        >>> layer = DeformConv2d(3, 8, kernel_size=3, padding="same")
        >>> layer(torch.rand(1, 3, 16, 16), torch.zeros(1, 18, 16, 16)).shape
        torch.Size([1, 8, 16, 16])

    Papers: `Deformable Convolutional Networks <https://arxiv.org/abs/1703.06211>`_ and `Deformable ConvNets v2: More
    Deformable, Better Results <https://arxiv.org/abs/1811.11168>`_.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        numbers = 0 if isinstance(padding, str) else padding
        super().__init__(in_channels, out_channels, kernel_size, stride, numbers, dilation, groups, bias)
        if isinstance(padding, str):
            check_word(padding, self.stride)
            self.padding = padding

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._convolve(input, offset, mask)

    def _convolve(self, input: Tensor, offset: Tensor, mask: Tensor | None) -> Tensor:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return deform_conv2d(input, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)
        # A script calls the operator itself, as the function around it is Python.
        if isinstance(self.padding, str):
            input, padding = pad_by_word(input, self.padding, self.kernel_size, self.dilation)
        else:
            padding = self.padding
        offset_groups = offset.shape[1] // (2 * self.kernel_size[0] * self.kernel_size[1])
        geometry = self.stride, padding, self.dilation, self.groups, offset_groups
        return torch.ops.myvision.deform_conv2d(input, self.weight, offset, mask, self.bias, *geometry)


class _ZeroConv2d(nn.Conv2d):
    """A convolution that starts at zero, also where something resets it."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class DeformConv2dPack(DeformConv2d):
    """Deformable convolution that predicts its own offsets and mask, with a plain convolution over the same input.

    That convolution, ``conv_offset``, starts at zero: every offset is 0 and every mask ``sigmoid(0) = 0.5``, so the
    layer starts as half a plain convolution, as in the paper. Its channels are the offsets, (down, right) for each tap,
    and then the masks; a ``state_dict`` of mmcv's ``ModulatedDeformConv2dPack`` loads as it is.

    Under ``torch.autocast`` that convolution runs in the dtype of its parameters: offsets are places, which a half type
    would round. The masks come with them and are rounded to autocast's dtype afterwards, as the input is.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in :class:`DeformConv2d`.
        offset_groups: groups of input channels with offsets and masks of their own. Default: 1.
        modulated: whether to predict masks as well (version 2), or offsets only (version 1). Default: True.

    Shape:
        - input: ``[batch, in_channels, height, width]``, of float64, float32, float16 or bfloat16, as the parameters.
        - output: ``[batch, out_channels, out_height, out_width]``.

    Raises:
        ValueError: channels are no multiple of groups or offset_groups, or ``padding="same"`` comes with a stride.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import DeformConv2dPack
        >>> layer = DeformConv2dPack(3, 8, kernel_size=3, padding=1)
        >>> layer(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])

    Paper: `Deformable ConvNets v2: More Deformable, Better Results <https://arxiv.org/abs/1811.11168>`_.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        offset_groups: int = 1,
        modulated: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        if in_channels % offset_groups:
            raise ValueError(f"in_channels ({in_channels}) must be a multiple of offset_groups ({offset_groups})")
        self.offset_groups = offset_groups
        self.modulated = modulated
        self.conv_offset = _ZeroConv2d(
            in_channels,
            (3 if modulated else 2) * offset_groups * self.kernel_size[0] * self.kernel_size[1],
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
        )

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        predicted = self._predict(input)
        if not self.modulated:
            return self._convolve(input, predicted, None)
        samples = self.offset_groups * self.kernel_size[0] * self.kernel_size[1]
        offset, mask = predicted.split([2 * samples, samples], dim=1)
        return self._convolve(input, offset, mask.sigmoid())

    def _predict(self, input: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            device_type = input.device.type
            if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    return self.conv_offset(input.to(self.conv_offset.weight.dtype))
        return self.conv_offset(input)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, offset_groups={self.offset_groups}, modulated={self.modulated})"
