"""What torch must be told of an element-wise operator: its fake, derivatives and vmap rule.

csrc/common/elementwise.h and broadcast.h are the same for the kernels, with the same messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from myvision._checks import FLOATING, check, name_of
from myvision._dispatch.arguments import arguments_of, call_by_name
from myvision._dispatch.autograd import register_autograd
from myvision._dispatch.fake import register_fake
from myvision._dispatch.vjp import gradients_of

_INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MAX_DIMS = 64


class Elementwise:
    """An operator that computes each element of its output from one element of each of its tensors.

    Shapes are broadcast and types promoted as by torch's own operators. Creating it registers the fake and the vmap
    rule.

    Args:
        op: the operator, for example ``torch.ops.myvision.my_add.default``. Its arguments are tensors and constants.
        integers: whether it takes integer types beside floating-point ones. bool goes with another type only.
        leader: the name of the tensor that is the first to say how the output lies in memory. Default: the first one.
    """

    def __init__(self, op: torch._ops.OpOverload, *, integers: bool = False, leader: str | None = None) -> None:
        self.op = op
        self.name = op.name().partition("::")[2]
        arguments = [argument.name for argument in op._schema.arguments]
        self.positions = [i for i, argument in enumerate(op._schema.arguments) if argument.type.kind() == "TensorType"]
        self.names = [arguments[i] for i in self.positions]
        self.leader = self.names.index(leader) if leader else 0
        self.dtypes = FLOATING + (_INTEGER if integers else ())
        self.wanted = "floating-point or integer dtypes" if integers else "floating-point dtypes"
        register_fake(lambda call: self._fake(*call), op)
        torch.library.register_vmap(op, self._vmap)

    def derive_from(self, formula: Callable[..., Tensor]) -> None:
        """Registers the derivatives of a differentiable formula of the same arguments."""

        arguments = arguments_of(self.op)

        def by_position(*inputs: Any) -> Tensor:
            return call_by_name(formula, arguments(*inputs))

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            inputs = list(ctx.constants)
            for i, tensor in zip(self.positions, ctx.saved_tensors, strict=True):
                inputs[i] = tensor
            return gradients_of(by_position, inputs, ctx.needs_input_grad, grad)

        register_autograd(self.op, self._save, backward, composite=formula)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(inputs[i] for i in self.positions))
        ctx.constants = [None if i in self.positions else value for i, value in enumerate(inputs)]

    def _fake(self, *args: Any) -> Tensor:
        tensors = [args[i] for i in self.positions]
        for name, tensor in zip(self.names, tensors, strict=True):
            check(self.name, tensor is not None, functools.partial("{} must be a tensor, but is None".format, name))
        check(
            self.name,
            all(tensor.device == tensors[0].device for tensor in tensors),
            lambda: f"tensors must be on one device, but got {self._list('on', [t.device for t in tensors])}",
        )
        dtypes = [tensor.dtype for tensor in tensors]
        dtype = (
            result_type(tensors) if all(dtype in (*self.dtypes, *_INTEGER, torch.bool) for dtype in dtypes) else None
        )
        check(
            self.name,
            dtype in self.dtypes,
            lambda: (
                f"tensors must have {self.wanted}, but got {self._list('of', [name_of(dtype) for dtype in dtypes])}"
            ),
        )
        check(
            self.name,
            all(tensor.dim() <= _MAX_DIMS for tensor in tensors),
            lambda: (
                f"tensors must have at most {_MAX_DIMS} dimensions, "
                f"but got {self._list('with', [tensor.dim() for tensor in tensors])}"
            ),
        )
        check(
            self.name,
            _broadcastable(tensors),
            lambda: f"shapes must broadcast together, but got {self._list('of', [tuple(t.shape) for t in tensors])}",
        )
        return empty_broadcast([tensor.to(dtype) for tensor in tensors], self.leader)

    def _list(self, verb: str, values: Sequence[Any]) -> str:
        """x of float32, y of float16 and z of int64"""
        *others, last = (f"{name} {verb} {value}" for name, value in zip(self.names, values, strict=True))
        return f"{', '.join(others)} and {last}" if others else last

    def _vmap(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Each sample is promoted and broadcast by its own dimensions."""
        batched = [(args[i], in_dims[i]) for i in self.positions]
        own_dims = [tensor.dim() - (dim is not None) for tensor, dim in batched]
        dtype = result_type([_like(tensor, dims) for (tensor, _), dims in zip(batched, own_dims, strict=True)])
        inputs = list(args)
        for i, (tensor, dim) in zip(self.positions, batched, strict=True):
            inputs[i] = _batch_first(tensor, dim, max(own_dims)).to(dtype)
        return self.op(*inputs), 0


def result_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """torch.result_type of any number of tensors."""
    of_scalars = [tensor.dtype for tensor in tensors if tensor.dim() == 0]
    of_others = [tensor.dtype for tensor in tensors if tensor.dim() > 0]
    representatives = [
        torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes), device="meta")
        for shape, dtypes in ((1, of_others), ((), of_scalars))
        if dtypes
    ]
    return torch.result_type(representatives[0], representatives[-1])


def _like(tensor: Tensor, dims: int) -> Tensor:
    """What result_type sees of a tensor of so many dimensions."""
    return torch.empty([1] * dims, dtype=tensor.dtype, device="meta")


def _batch_first(tensor: Tensor, batch_dim: int | None, dims: int) -> Tensor:
    if batch_dim is None:
        return tensor
    tensor = tensor.movedim(batch_dim, 0)
    missing = dims + 1 - tensor.dim()
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:])


# ---- the output's memory ---------------------------------------------------------------------------------------------


def _broadcastable(tensors: Sequence[Tensor]) -> bool:
    shape: list[int] = []  # innermost dimension first
    for tensor in tensors:
        sizes = list(reversed(tensor.shape))
        if not all(a == b or a == 1 or b == 1 for a, b in zip(sizes, shape, strict=False)):
            return False
        longer = max(sizes, shape, key=len)
        shape = [b if a == 1 else a for a, b in zip(sizes, shape, strict=False)] + longer[min(len(sizes), len(shape)) :]
    return True


def empty_broadcast(tensors: Sequence[Tensor], leader: int = 0) -> Tensor:
    """An uninitialised tensor of the type of the tensors, shaped and laid out as torch's own operators do it.

    Args:
        tensors: of one type, of shapes that broadcast together.
        leader: the one that is asked first how the output is to lie in memory; then come those after it.
    """
    first = tensors[0]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if all(tensor.dim() == first.dim() and tensor.shape == first.shape for tensor in tensors):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            if all(tensor.is_contiguous(memory_format=memory_format) for tensor in tensors):
                return torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=memory_format)
        if all(tensor.stride() == first.stride() for tensor in tensors) and _is_dense(first):
            return first.new_empty_strided(shape, first.stride())
    asked = [*tensors[leader:], *tensors[:leader]]
    order = _sort_by_stride(shape, [_broadcast_strides(tensor, shape) for tensor in asked])
    if order == list(reversed(range(len(shape)))):
        return first.new_empty(shape)
    return first.new_empty_strided(shape, _packed_strides(shape, order))


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _broadcast_strides(operand: Tensor, shape: Sequence[int]) -> list[int]:
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return [0] * missing + [stride if size == broadcast_size else 0 for size, stride, broadcast_size in own]


def _sort_by_stride(shape: Sequence[int], strides: list[list[int]]) -> list[int]:
    """The dimensions, innermost first. Pairs that the strides do not decide stay as they are and are passed over."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for below in reversed(range(start)):
            comparison = _compare(shape, strides, order[below], order[at])
            if comparison < 0:
                break
            if comparison > 0:
                order[below], order[at] = order[at], order[below]
                at = below
    return order


def _compare(shape: Sequence[int], strides: list[list[int]], inner: int, outer: int) -> int:
    for stride in strides:
        if stride[inner] == 0 or stride[outer] == 0:
            continue
        if stride[inner] != stride[outer]:
            return -1 if stride[inner] < stride[outer] else 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _packed_strides(shape: Sequence[int], order: list[int]) -> list[int]:
    strides = [0] * len(shape)
    stride = 1
    for dim in order:
        strides[dim] = stride
        stride *= shape[dim]
    return strides
