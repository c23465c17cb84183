"""linear in ONNX: Gemm of matrices with a bias, MatMul and Add otherwise, and what comes behind."""

from __future__ import annotations

import torch

from myvision.onnx._graph import Opset, UnsupportedError, Value
from myvision.onnx._norm import finish


def linear(
    op: Opset,
    *,
    input: Value,
    weight: Value,
    bias: Value,
    activation: str | None,
    negative_slope: float,
    dropout_p: float,
    seed: Value,
    residual: Value,
) -> Value:
    if dropout_p:
        raise UnsupportedError("linear with dropout has no form in ONNX: call model.eval() first")
    if bias is not None and len(input.shape) == 2:
        output = op.Gemm(input, weight, bias, transB=1)
    else:
        output = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
        output = output if bias is None else op.Add(output, bias)
    output = finish(op, output, residual=None, activation=activation, negative_slope=negative_slope)
    return output if residual is None else op.Add(output, residual)


TRANSLATIONS = {torch.ops.myvision.linear.default: linear}
