"""The norms in ONNX: its own node where it has one, with Add and the activation behind it; else the formula.

Its nodes take no negative eps, which the formula does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Value = Any  # a value of the graph that onnxscript builds
HALF_TYPES = ("FLOAT16", "BFLOAT16")


def norm_translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translations of the norms, by operator."""
    norms = _Norms(opset)
    translations = (
        norms.batch_norm,
        norms.instance_norm,
        norms.group_norm,
        norms.layer_norm,
        norms.rms_norm,
        norms.add_layer_norm,
        norms.add_rms_norm,
    )
    return {getattr(torch.ops.myvision, method.__name__).default: _as_function(method) for method in translations}


def _as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """The exporter notes on a translation what it learns of it, which a method does not allow."""

    @functools.wraps(method)
    def translation(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return translation


class _Norms:
    """Each method translates the operator of its name, whose arguments it takes."""

    def __init__(self, opset: int) -> None:
        from onnxscript.values import Opset

        self.opset = opset
        self.op = Opset("", opset)

    def batch_norm(
        self,
        input: Value,
        running_mean: Value,
        running_var: Value,
        weight: Value,
        bias: Value,
        residual: Value,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> Value:
        if running_mean is None:
            axes = [0, *range(2, len(input.shape))]
            return self._by_hand(input, axes, weight, bias, eps, residual, activation, negative_slope, channels_dim=1)
        scale, shift = self._affine(weight, bias, [input.shape[1]], input)
        mean, var = self._like(running_mean, input), self._like(running_var, input)
        output, *_ = self.op.BatchNormalization(input, scale, shift, mean, var, epsilon=eps)
        return self._finish(output, residual, activation, negative_slope)

    def instance_norm(
        self,
        input: Value,
        running_mean: Value,
        running_var: Value,
        weight: Value,
        bias: Value,
        residual: Value,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> Value:
        if running_mean is not None:
            return self.batch_norm(
                input, running_mean, running_var, weight, bias, residual, eps, activation, negative_slope
            )
        if eps < 0:
            axes = list(range(2, len(input.shape)))
            return self._by_hand(input, axes, weight, bias, eps, residual, activation, negative_slope, channels_dim=1)
        scale, shift = self._affine(weight, bias, [input.shape[1]], input)
        output = self.op.InstanceNormalization(input, scale, shift, epsilon=eps)
        return self._finish(output, residual, activation, negative_slope)

    def group_norm(
        self,
        input: Value,
        num_groups: int,
        weight: Value,
        bias: Value,
        residual: Value,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> Value:
        if self.opset >= 21 and eps >= 0:  # before, the affine map was one of groups
            scale, shift = self._affine(weight, bias, [input.shape[1]], input)
            output = self.op.GroupNormalization(input, scale, shift, epsilon=eps, num_groups=num_groups)
            return self._finish(output, residual, activation, negative_slope)
        groups = self.op.Reshape(input, self.op.Constant(value_ints=[0, num_groups, -1]))
        groups.dtype = input.dtype
        if eps < 0:
            normalised = self._by_hand(groups, [2], None, None, eps, None, None, 0.0, channels_dim=None)
        else:
            ones, zeros = self._affine(None, None, [num_groups], input)
            normalised = self.op.InstanceNormalization(groups, ones, zeros, epsilon=eps)
        output = self.op.Reshape(normalised, self.op.Shape(input))
        scaled = self._scale(output, weight, bias, self._channel_shape(input), input)
        return self._finish(scaled, residual, activation, negative_slope)

    def layer_norm(
        self,
        input: Value,
        normalized_shape: Sequence[int],
        weight: Value,
        bias: Value,
        residual: Value,
        channels_first: bool,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> Value:
        if channels_first or eps < 0:
            axes = [1] if channels_first else list(range(-len(normalized_shape), 0))
            channels_dim = 1 if channels_first else None
            return self._by_hand(input, axes, weight, bias, eps, residual, activation, negative_slope, channels_dim)
        scale, shift = self._affine(weight, bias, normalized_shape, input)
        output, *_ = self.op.LayerNormalization(input, scale, shift, axis=-len(normalized_shape), epsilon=eps)
        return self._finish(output, residual, activation, negative_slope)

    def rms_norm(
        self,
        input: Value,
        normalized_shape: Sequence[int],
        weight: Value,
        residual: Value,
        channels_first: bool,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> Value:
        if self.opset >= 23 and not channels_first and eps >= 0:
            scale, _ = self._affine(weight, None, normalized_shape, input)
            output = self.op.RMSNormalization(input, scale, axis=-len(normalized_shape), epsilon=eps)
            return self._finish(output, residual, activation, negative_slope)
        axes = [1] if channels_first else list(range(-len(normalized_shape), 0))
        channels_dim = 1 if channels_first else None
        return self._by_hand(
            input, axes, weight, None, eps, residual, activation, negative_slope, channels_dim, centered=False
        )

    def add_layer_norm(
        self,
        input: Value,
        residual: Value,
        normalized_shape: Sequence[int],
        weight: Value,
        bias: Value,
        eps: float,
        dropout_p: float,
        seed: Value,
    ) -> tuple[Value, Value]:
        sum = self._sum(input, residual, dropout_p, "add_layer_norm")
        return self.layer_norm(sum, normalized_shape, weight, bias, None, False, eps, None, 0.0), sum

    def add_rms_norm(
        self,
        input: Value,
        residual: Value,
        normalized_shape: Sequence[int],
        weight: Value,
        eps: float,
        dropout_p: float,
        seed: Value,
    ) -> tuple[Value, Value]:
        sum = self._sum(input, residual, dropout_p, "add_rms_norm")
        return self.rms_norm(sum, normalized_shape, weight, None, False, eps, None, 0.0), sum

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _sum(self, input: Value, residual: Value, dropout_p: float, name: str) -> Value:
        if dropout_p:
            raise UnsupportedError(f"{name} with dropout has no form in ONNX: call model.eval() first")
        sum = self.op.Add(input, residual)
        sum.dtype, sum.shape = input.dtype, input.shape
        return sum

    def _by_hand(
        self,
        input: Value,
        axes: Sequence[int],
        weight: Value,
        bias: Value,
        eps: float,
        residual: Value,
        activation: str | None,
        negative_slope: float,
        channels_dim: int | None,
        centered: bool = True,
    ) -> Value:
        """The formula; half types are computed in float32."""
        op = self.op
        axes_value = op.Constant(value_ints=list(axes))
        x = op.Cast(input, to=1) if input.dtype.name in HALF_TYPES else input
        if centered:
            x = op.Sub(x, op.ReduceMean(x, axes_value))
        mean_square = op.ReduceMean(op.Mul(x, x), axes_value)
        epsilon = op.CastLike(op.Constant(value_float=eps), x)
        output = op.CastLike(op.Div(x, op.Sqrt(op.Add(mean_square, epsilon))), input)
        shape = None if channels_dim is None else self._channel_shape(input)
        return self._finish(self._scale(output, weight, bias, shape, input), residual, activation, negative_slope)

    def _scale(self, x: Value, weight: Value, bias: Value, shape: list[int] | None, input: Value) -> Value:
        for node, parameter in ((self.op.Mul, weight), (self.op.Add, bias)):
            if parameter is not None:
                term = self._like(parameter, input)
                x = node(x, term if shape is None else self.op.Reshape(term, self.op.Constant(value_ints=shape)))
        return x

    def _finish(self, x: Value, residual: Value, activation: str | None, negative_slope: float) -> Value:
        op = self.op
        if residual is not None:
            x = op.Add(x, residual)
        if activation is None:
            return x
        if activation == "leaky_relu":
            return op.LeakyRelu(x, alpha=negative_slope)
        if activation in ("gelu", "gelu_tanh"):
            return self._gelu(x, tanh=activation == "gelu_tanh")
        if activation == "silu":
            return op.Mul(x, op.Sigmoid(x))
        return op.Relu(x) if activation == "relu" else op.HardSwish(x)

    def _gelu(self, x: Value, tanh: bool) -> Value:
        op = self.op
        if self.opset >= 20:
            return op.Gelu(x, approximate="tanh" if tanh else "none")

        def number(value: float) -> Value:
            return op.CastLike(op.Constant(value_float=value), x)

        if tanh:
            cubic = op.Mul(number(0.044715), op.Mul(x, op.Mul(x, x)))
            bent = op.Tanh(op.Mul(number(math.sqrt(2 / math.pi)), op.Add(x, cubic)))
        else:
            bent = op.Erf(op.Mul(x, number(math.sqrt(0.5))))
        return op.Mul(op.Mul(number(0.5), x), op.Add(number(1.0), bent))

    def _affine(self, weight: Value, bias: Value, shape: Sequence[int], input: Value) -> tuple[Value, Value]:
        """Weight and bias of the input's dtype, ones and zeros where there is none."""
        return self._like(weight, input, shape, 1.0), self._like(bias, input, shape, 0.0)

    def _like(self, parameter: Value, input: Value, shape: Sequence[int] = (), default: float = 0.0) -> Value:
        from onnx.helper import make_tensor

        if parameter is None:
            count = math.prod(int(size) for size in shape)
            constant = self.op.Constant(
                value=make_tensor("default", 1, [int(size) for size in shape], [default] * count)
            )
            return constant if input.dtype.name == "FLOAT" else self.op.Cast(constant, to=input.dtype)
        return parameter if parameter.dtype == input.dtype else self.op.Cast(parameter, to=input.dtype)

    def _channel_shape(self, input: Value) -> list[int]:
        return [-1, *[1] * (len(input.shape) - 2)]


class UnsupportedError(ValueError):
    """An operator that the ONNX version asked for cannot express."""
