"""Deformable convolution: the functional API, and what torch must know of the operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import (
    check,
    check_floating,
    check_like,
    check_output_mask,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensors,
    name_of,
    pair,
)
from myvision._dispatch.arguments import arguments_of, call_by_name, needs_of
from myvision._dispatch.autocast import cast_to, register_autocast
from myvision._dispatch.autograd import register_autograd, register_second_derivative
from myvision._dispatch.fake import register_fake
from myvision._dispatch.overrides import overridable
from myvision._dispatch.tracing import constant
from myvision._formulas import deform_conv2d as formula
from myvision._layout import is_channels_last

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_OP = "deform_conv2d"
_forward = torch.ops.myvision.deform_conv2d.default
_backward = torch.ops.myvision._deform_conv2d_backward.default
_Arguments = arguments_of(_forward)


@overridable
def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | Literal["same", "valid"] = 0,
    dilation: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Deformable convolution: every tap of the kernel samples the input where its offset points to.

    Version 1 of the paper without a mask, version 2 with one; a drop-in replacement of
    ``torchvision.ops.deform_conv2d``. Samples between pixels are bilinear, pixels outside the image are 0, and a sample
    a whole pixel or more outside, infinite or NaN is 0 with zero gradients. The number of groups is
    ``input.shape[1] // weight.shape[1]``, that of offset groups ``offset.shape[1] // (2 * kernel_height *
    kernel_width)``. Half types are accumulated in float32, and places are computed in float32 at least.

    Under ``torch.autocast`` input, weight, mask and bias take autocast's dtype, and so does the result, as that of
    ``torch.nn.functional.conv2d``. Offsets are places, not activations: they stay as they are, or become float32. This
    is the one difference from torchvision, which computes in float32 there and returns the dtype of the input.

    Under ``torch.use_deterministic_algorithms(True)`` the gradients have the same bits in every run and, on the CPU,
    for any number of threads; the result always has.

    Args:
        input: ``[batch, in_channels, height, width]``, of float64, float32, float16 or bfloat16, as every other tensor
            but offset.
        offset: ``[batch, 2 * offset_groups * kernel_height * kernel_width, out_height, out_width]``: for each tap, row
            by row, how far down and how far right it is moved, in pixels. Of the input's dtype, or of float32 beside
            a half type.
        weight: ``[out_channels, in_channels // groups, kernel_height, kernel_width]``.
        bias: ``[out_channels]``. Default: none.
        stride: step between samples, one number or (vertical, horizontal). Default: 1.
        padding: zeros around the image, one number or (vertical, horizontal); ``"same"`` keeps the size of the input
            (stride 1 only, an odd zero goes to the bottom and right, as in ``torch.nn.functional.conv2d``); ``"valid"``
            is 0. Default: 0.
        dilation: distance between the taps, one number or (vertical, horizontal). Default: 1.
        mask: ``[batch, offset_groups * kernel_height * kernel_width, out_height, out_width]``, a factor for each
            sample. Default: none.

    Returns:
        ``[batch, out_channels, out_height, out_width]``, of the input's dtype; channels_last where input or weight is,
        as ``torch.nn.functional.conv2d`` decides it.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together, or a number is out of range.
        TypeError: an argument that has to be a tensor is none.
        ValueError: ``padding`` is an unknown word, or ``"same"`` with a stride.

    Example::

        >>> import torch
        >>> from myvision.ops import deform_conv2d
        >>> input, weight = torch.rand(4, 3, 10, 10), torch.rand(5, 3, 3, 3)
        >>> offset, mask = torch.zeros(4, 2 * 3 * 3, 8, 8), torch.ones(4, 3 * 3, 8, 8)
        >>> deform_conv2d(input, offset, weight, mask=mask).shape
        torch.Size([4, 5, 8, 8])

    Papers: `Deformable Convolutional Networks <https://arxiv.org/abs/1703.06211>`_ and `Deformable ConvNets v2: More
    Deformable, Better Results <https://arxiv.org/abs/1811.11168>`_.
    """
    check_tensors(_OP, {"input": input, "offset": offset, "weight": weight}, bias=bias, mask=mask)
    strides, dilations = pair(stride), pair(dilation)
    if isinstance(padding, str):
        check_word(padding, strides)
    groups = offset_groups = 1
    if input.dim() == weight.dim() == offset.dim() == 4:  # or else the operator says what is wrong
        kernel_size = constant(weight.shape[2]), constant(weight.shape[3])
        groups = _quotient(input.shape[1], constant(weight.shape[1]))
        offset_groups = _quotient(offset.shape[1], 2 * kernel_size[0] * kernel_size[1])
        if isinstance(padding, str):
            input, padding = pad_by_word(input, padding, kernel_size, dilations)
    amounts = (0, 0) if isinstance(padding, str) else pair(padding)
    output: Tensor = _forward(input, weight, offset, mask, bias, strides, amounts, dilations, groups, offset_groups)
    return output


def _quotient(channels: int, share: int) -> int:
    """How many groups there are; at least 1, so that what does not fit is an error about channels, not about groups."""
    return max(constant(channels) // max(share, 1), 1)


def check_word(padding: str, stride: Sequence[int]) -> None:
    if padding not in ("same", "valid"):
        raise ValueError(f"deform_conv2d: padding must be numbers, 'same' or 'valid', but is {padding!r}")
    if padding == "same" and tuple(stride) != (1, 1):
        raise ValueError(f"deform_conv2d: padding='same' needs stride 1, but stride is {tuple(stride)}")


def pad_by_word(
    input: Tensor, padding: str, kernel_size: tuple[int, int], dilation: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """The input and the padding that a word stands for: what "same" cannot split evenly joins the input.

    It is in the language of torch.jit.script.
    """
    if padding == "valid":
        return input, (0, 0)
    down, right = dilation[0] * (kernel_size[0] - 1), dilation[1] * (kernel_size[1] - 1)
    if down % 2 != 0 or right % 2 != 0:
        input = F.pad(input, [0, right % 2, 0, down % 2])
    return input, (down // 2, right // 2)


# ---- what the operator returns, and what it rejects: the same as csrc/ops/deform_conv2d/deform_conv2d.cpp ------------


def _check_rank(name: str, tensor: Tensor, layout: str) -> None:
    rank = layout.count(",") + 1
    check(
        _OP,
        tensor.dim() == rank,
        lambda: f"{name} must have {rank} dimensions ({layout}), but has shape {tuple(tensor.shape)}",
    )


def _check_input(input: Tensor) -> None:
    _check_rank("input", input, "batch, in_channels, height, width")
    check_floating(_OP, "input", input)


def _check_other(name: str, tensor: Tensor, layout: str, input: Tensor) -> None:
    _check_rank(name, tensor, layout)
    check_like(_OP, name, tensor, input)


def _check_offset_dtype(offset: Tensor, input: Tensor) -> None:
    """Offsets are places: float32 ones may stand beside half types, which would round them."""
    if input.dtype not in _HALF_DTYPES:
        check_same_dtype(_OP, "offset", offset, input)
        return
    check(
        _OP,
        offset.dtype in (input.dtype, torch.float32),
        lambda: (
            f"offset must have the dtype of input, {name_of(input.dtype)}, or float32, but has {name_of(offset.dtype)}"
        ),
    )


def _check_range(name: str, value: int, least: int, most: int = 2**20) -> None:
    check(_OP, least <= value, lambda: f"{name} must be between {least} and {most}, but is {value}")
    check(_OP, value <= most, lambda: f"{name} must be between {least} and {most}, but is {value}")


def _check_pair(name: str, pair: Sequence[int], least: int) -> None:
    check(_OP, len(pair) == 2, lambda: f"{name} must have 2 elements (height, width), but has {len(pair)}")
    for value in pair:
        _check_range(name, value, least)


def _check_sizes(input: Tensor, weight: Tensor, groups: int, offset_groups: int) -> None:
    (_, C, H, W), (K, share, kernel_h, kernel_w) = input.shape, weight.shape
    _check_range("in_channels (input.shape[1])", C, 1)
    _check_range("height (input.shape[2])", H, 1, 2**31 - 1)
    _check_range("width (input.shape[3])", W, 1, 2**31 - 1)
    _check_range("kernel height (weight.shape[2])", kernel_h, 1)
    _check_range("kernel width (weight.shape[3])", kernel_w, 1)
    check(
        _OP,
        share * groups == C,
        lambda: f"weight.shape[1] ({share}) times groups ({groups}) must be the number of input channels, {C}",
    )
    check(
        _OP,
        K % groups == 0,
        lambda: f"out_channels (weight.shape[0] = {K}) must be a multiple of groups ({groups})",
    )
    check(
        _OP,
        C % offset_groups == 0,
        lambda: f"in_channels (input.shape[1] = {C}) must be a multiple of offset_groups ({offset_groups})",
    )


def _output_size(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    kernel = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    image = [size + 2 * p for size, p in zip(input.shape[2:], padding, strict=True)]
    for i in (0, 1):
        check(
            _OP,
            kernel[i] <= image[i],
            lambda: (
                f"the dilated kernel, {kernel[0]} x {kernel[1]}, must fit into the padded input, "
                f"{image[0]} x {image[1]}"
            ),
        )
    return [(image[i] - kernel[i]) // stride[i] + 1 for i in (0, 1)]


def _output_shape(call: Any) -> list[int]:
    """The shape of the output, once every argument is checked. An argument that the operator lacks is not given."""
    input, weight, offset, mask, bias = call.input, call.weight, call.offset, call.mask, getattr(call, "bias", None)
    samples_layout = "offset_groups * kernel_height * kernel_width, out_height, out_width"
    offset_layout, mask_layout = f"batch, 2 * {samples_layout}", f"batch, {samples_layout}"
    _check_input(input)
    _check_other("weight", weight, "out_channels, in_channels / groups, kernel_height, kernel_width", input)
    _check_rank("offset", offset, offset_layout)
    _check_offset_dtype(offset, input)
    check_same_device(_OP, "offset", offset, input)
    if mask is not None:
        _check_other("mask", mask, mask_layout, input)
    if bias is not None:
        _check_other("bias", bias, "out_channels", input)
    _check_pair("stride", call.stride, 1)
    _check_pair("padding", call.padding, 0)
    _check_pair("dilation", call.dilation, 1)
    _check_range("groups", call.groups, 1)
    _check_range("offset_groups", call.offset_groups, 1)
    _check_sizes(input, weight, call.groups, call.offset_groups)
    N, (K, _, kernel_h, kernel_w) = input.shape[0], weight.shape
    output_size = _output_size(input, weight, call.stride, call.padding, call.dilation)
    samples = call.offset_groups * kernel_h * kernel_w
    check_shape(_OP, "offset", offset, (N, 2 * samples, *output_size), offset_layout)
    if mask is not None:
        check_shape(_OP, "mask", mask, (N, samples, *output_size), mask_layout)
    if bias is not None:
        check_shape(_OP, "bias", bias, (K,), "out_channels")
    if input.device.type == "cpu":
        _check_plane(*input.shape[2:])
    return [N, K, *output_size]


def _check_plane(height: int, width: int) -> None:
    check(
        _OP,
        (height + 3) * (width + 2) <= 2**31 - 1,
        lambda: (
            f"input has planes of {height} x {width} pixels; on the CPU they must have less than 2^31, a border "
            "included"
        ),
    )


def _fake(call: Any) -> Tensor:
    input, shape = call.input, _output_shape(call)
    channels_last = is_channels_last(input) or is_channels_last(call.weight)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format)


def _fake_backward(call: Any) -> tuple[Tensor | None, ...]:
    weight, mask, wanted = call.weight, call.mask, call.output_mask
    shape = _output_shape(call)
    layout = "batch, out_channels, out_height, out_width"
    _check_other("grad_output", call.grad_output, layout, call.input)
    check_shape(_OP, "grad_output", call.grad_output, shape, layout)
    check_output_mask(_OP, wanted, 5)
    check(_OP, mask is not None or not wanted[3], lambda: "output_mask asks for the gradient of mask, but mask is None")
    bias = weight.new_empty(weight.shape[0])
    return tuple(
        torch.empty_like(like) if is_wanted and like is not None else None
        for is_wanted, like in zip(wanted, (call.input, weight, call.offset, mask, bias), strict=True)
    )


# ---- derivatives: the first by the fused kernel, the others through the formula --------------------------------------


def _setup_context(ctx: Any, call: Any, output: Tensor) -> None:
    ctx.save_for_backward(call.input, call.weight, call.offset, call.mask)
    ctx.geometry = call.stride, call.padding, call.dilation, call.groups, call.offset_groups


def _first_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needs = needs_of(_Arguments, ctx)
    wanted = [needs.input, needs.weight, needs.offset, needs.mask, needs.bias]
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = _backward(grad_output, *ctx.saved_tensors, *ctx.geometry, wanted, deterministic)
    input, weight, offset, mask, bias = gradients
    return _Arguments(input=input, weight=weight, offset=offset, mask=mask, bias=bias)


def _gradients(call: Any) -> tuple[Tensor | None, ...]:
    """What the backward operator returns."""
    gradients = call_by_name(formula.deform_conv2d_backward, call)
    return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, call.output_mask, strict=True))


# ---- torch.autocast --------------------------------------------------------------------------------------------------


def _cast(call: Any, device_type: str) -> Iterable[Any]:
    """Offsets are places, which neither dtype of theirs rounds: they stay as they are, or become float32."""
    dtype = torch.get_autocast_dtype(device_type)
    cast = {name: cast_to(getattr(call, name), dtype, device_type) for name in ("input", "weight", "mask", "bias")}
    offset_dtype = dtype if call.offset.dtype == dtype else torch.float32
    return call._replace(offset=cast_to(call.offset, offset_dtype, device_type), **cast)


# ---- torch.vmap: more images where the weights are shared, more groups of channels where they are not ----------------

# The dimension of the channels, into which a batch goes.
_CHANNEL_DIMS = {"grad_output": 1, "input": 1, "weight": 0, "offset": 1, "mask": 1, "bias": 0}


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    call, batched = _Arguments(*args), _Arguments(*in_dims)
    if batched.weight is None and batched.bias is None:
        images = ("input", "offset", "mask")
        folded = {name: _fold(getattr(call, name), getattr(batched, name), 0, info.batch_size) for name in images}
        return _forward(*call._replace(**folded)).unflatten(0, (info.batch_size, -1)), 0
    output = _forward(*_with_more_groups(call, batched, info.batch_size))
    return output.unflatten(1, (info.batch_size, -1)), 1


def _vmap_backward(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    arguments = arguments_of(_backward)
    gradients = _backward(*_with_more_groups(arguments(*args), arguments(*in_dims), info.batch_size))
    dims = tuple(_CHANNEL_DIMS[name] for name in ("input", "weight", "offset", "mask", "bias"))
    unfolded = (
        None if gradient is None else gradient.unflatten(dim, (info.batch_size, -1))
        for gradient, dim in zip(gradients, dims, strict=True)
    )
    return tuple(unfolded), dims


def _with_more_groups(call: Any, batched: Any, batch_size: int) -> Any:
    """The arguments of one call for the whole batch: its elements become groups of channels, and of offsets."""
    folded = {
        name: _fold(getattr(call, name), getattr(batched, name), dim, batch_size)
        for name, dim in _CHANNEL_DIMS.items()
        if name in call._fields
    }
    return call._replace(groups=call.groups * batch_size, offset_groups=call.offset_groups * batch_size, **folded)


def _fold(tensor: Tensor | None, batch_dim: int | None, dim: int, batch_size: int) -> Tensor | None:
    """Moves the dimension that vmap hides, or repeats where there is none, into the front of another one."""
    if tensor is None:
        return None
    if batch_dim is None:
        return tensor.unsqueeze(dim).repeat_interleave(batch_size, dim).flatten(dim, dim + 1)
    return tensor.movedim(batch_dim, dim).flatten(dim, dim + 1)


register_fake(_fake, _forward)
register_fake(_fake_backward, _backward)
torch.library.register_vmap(_forward, _vmap)
torch.library.register_vmap(_backward, _vmap_backward)
register_autograd(_forward, _setup_context, _first_backward, composite=formula.deform_conv2d)
register_second_derivative(_backward, _gradients)
register_autocast(_forward, _cast)
