"""What the translations of the norms share: affine maps, the formula where ONNX has no node, and what comes behind.

ONNX's own nodes take no negative eps, which the formula does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from myvision.onnx._graph import Opset, UnsupportedError, Value, cast_to_type_of, constant, full, real


def affine(op: Opset, input: Value, weight: Value, bias: Value, shape: Sequence[int]) -> tuple[Value, Value]:
    """Weight and bias of the input's type, ones and zeros where there is none."""
    scale = full(op, shape, 1.0, input) if weight is None else cast_to_type_of(op, weight, input)
    shift = full(op, shape, 0.0, input) if bias is None else cast_to_type_of(op, bias, input)
    return scale, shift


def channel_shape(input: Value) -> list[int]:
    """What a number a channel is reshaped to where channels are dimension 1."""
    return [-1, *[1] * (len(input.shape) - 2)]


def scale_and_shift(
    op: Opset, x: Value, input: Value, weight: Value, bias: Value, shape: Sequence[int] | None = None
) -> Value:
    for node, parameter in ((op.Mul, weight), (op.Add, bias)):
        if parameter is not None:
            term = cast_to_type_of(op, parameter, input)
            x = node(x, term if shape is None else op.Reshape(term, op.Constant(value_ints=list(shape))))
    return x


def normalise(op: Opset, input: Value, axes: Sequence[int], eps: float, centered: bool = True) -> Value:
    """The formula, without weight and bias."""
    axes_value = op.Constant(value_ints=list(axes))
    x = real(op, input)
    if centered:
        x = op.Sub(x, op.ReduceMean(x, axes_value))
    mean_square = op.ReduceMean(op.Mul(x, x), axes_value)
    return op.CastLike(op.Div(x, op.Sqrt(op.Add(mean_square, constant(op, eps, x)))), input)


def finish(op: Opset, x: Value, *, residual: Value, activation: str | None, negative_slope: float) -> Value:
    """``activation(x + residual)``."""
    if residual is not None:
        x = op.Add(x, residual)
    match activation:
        case None:
            return x
        case "relu":
            return op.Relu(x)
        case "leaky_relu":
            return op.LeakyRelu(x, alpha=negative_slope)
        case "silu":
            return op.Mul(x, op.Sigmoid(x))
        case "hardswish":
            return op.HardSwish(x)
        case "gelu" | "gelu_tanh":
            return _gelu(op, x, tanh=activation == "gelu_tanh")
    raise AssertionError(activation)


def _gelu(op: Opset, x: Value, tanh: bool) -> Value:
    if op.version >= 20:
        return op.Gelu(x, approximate="tanh" if tanh else "none")
    if tanh:
        cubic = op.Mul(constant(op, 0.044715, x), op.Mul(x, op.Mul(x, x)))
        bent = op.Tanh(op.Mul(constant(op, math.sqrt(2 / math.pi), x), op.Add(x, cubic)))
    else:
        bent = op.Erf(op.Mul(x, constant(op, math.sqrt(0.5), x)))
    return op.Mul(op.Mul(constant(op, 0.5, x), x), op.Add(constant(op, 1.0, x), bent))


def add(op: Opset, input: Value, residual: Value, dropout_p: float, name: str) -> Value:
    """The sum that add_layer_norm and add_rms_norm normalise."""
    if dropout_p:
        raise UnsupportedError(f"{name} with dropout has no form in ONNX: call model.eval() first")
    sum = op.Add(input, residual)
    sum.dtype, sum.shape = input.dtype, input.shape
    return sum
