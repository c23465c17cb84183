"""What the translations share: the values they build a graph of, and its small pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from myvision._elementwise import result_type

DOMAIN = "myvision"  # of the nodes that ONNX does not have

Value = Any  # a value of the graph that onnxscript builds
Opset = Any  # onnxscript's, of the version asked for: op.Add(x, y) writes a node, op.version is its number
Translation = Callable[..., Value]

FLOAT = 1  # ONNX's number of the type
HALF_TYPES = ("FLOAT16", "BFLOAT16")


class UnsupportedError(ValueError):
    """An operator that the ONNX version asked for cannot express."""


def real(op: Opset, x: Value) -> Value:
    """Half types are computed in float32."""
    return op.Cast(x, to=FLOAT) if x.dtype.name in HALF_TYPES else x


def constant(op: Opset, number: float, like: Value) -> Value:
    """A number in the type of a value, rounded once."""
    import onnx_ir

    exact = onnx_ir.DataType.DOUBLE if isinstance(number, float) else onnx_ir.DataType.INT64
    return op.CastLike(op.Constant(value=onnx_ir.tensor(number, dtype=exact)), like)


def cast_to_type_of(op: Opset, x: Value, like: Value) -> Value:
    return x if x.dtype == like.dtype else op.Cast(x, to=like.dtype)


def full(op: Opset, shape: Sequence[int], value: float, like: Value) -> Value:
    """A constant tensor of one number, of the type of ``like``."""
    from onnx.helper import make_tensor

    sizes = [int(size) for size in shape]
    constant = op.Constant(value=make_tensor("default", FLOAT, sizes, [value] * math.prod(sizes)))
    return constant if like.dtype.name == "FLOAT" else op.Cast(constant, to=like.dtype)


def function_node(name: str, inputs: Sequence[str]) -> Translation:
    """Writes a node of the domain myvision, whose inputs and output are of one type, and whose body the model carries.

    The exporter inlines each function that it knows: so the node is written bare, and ``export`` adds the body at the
    end.
    """
    from onnx.defs import OpSchema
    from onnxscript.values import Op
    from onnxscript.values import Opset as OpsetOf

    numbers = ("double", "float", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
    parameters = [OpSchema.FormalParameter(input, "T") for input in inputs]
    outputs = [OpSchema.FormalParameter("output", "T")]
    types = [("T", [f"tensor({number})" for number in numbers], "any number")]
    schema = OpSchema(name, DOMAIN, 1, inputs=parameters, outputs=outputs, type_constraints=types)
    return Op(OpsetOf(DOMAIN, 1), name, schema)


def promoted(op: Opset, *values: Value) -> list[Value]:
    """The values, each with a Cast in front where its type is not the one that torch promotes them to."""
    from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype

    examples = [
        torch.empty((1,) * len(value.shape), dtype=to_torch_dtype(value.dtype), device="meta") for value in values
    ]
    dtype = from_torch_dtype(result_type(examples))
    return [value if value.dtype == dtype else op.Cast(value, to=dtype) for value in values]
