"""What the translations of element-wise operators share."""

from __future__ import annotations

from typing import Any

import torch


def promoted(op: Any, *values: Any) -> list[Any]:
    """The values, each with a Cast in front where its type is not the one that torch promotes them to.

    Args:
        op: the opset whose Cast is written.
        values: of the graph that onnxscript builds.
    """
    dtype = _result_type(values)
    return [value if value.dtype == dtype else op.Cast(value, to=dtype) for value in values]


def constant(op: Any, number: float, like: Any) -> Any:
    """A number in the type of a value, rounded once."""
    import onnx_ir

    exact = onnx_ir.DataType.DOUBLE if isinstance(number, float) else onnx_ir.DataType.INT64
    return op.CastLike(op.Constant(value=onnx_ir.tensor(number, dtype=exact)), like)


def _result_type(values: tuple[Any, ...]) -> Any:
    """Return the ONNX type that torch promotes the values to; it minds tensors without dimensions."""
    from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype

    from myvision._elementwise import result_type

    examples = [
        torch.empty((1,) * len(value.shape), dtype=to_torch_dtype(value.dtype), device="meta") for value in values
    ]
    return from_torch_dtype(result_type(examples))
