"""my_add in ONNX, which has no such node: myvision::my_add, and the model carries its function body."""

from __future__ import annotations

import torch

from myvision.onnx._graph import Opset, Value, function_node, promoted

# x + x is exact in every type; a product with 2 would need a constant of the type of x.
FUNCTION_BODY = """
<domain: "myvision", opset_import: ["": {opset}]>
my_add (x, y) => (output) {{
    twice_x = Add(x, x)
    output = Add(twice_x, y)
}}
"""


def my_add(op: Opset, *, x: Value, y: Value) -> Value:
    return function_node("my_add", ["x", "y"])(*promoted(op, x, y))


TRANSLATIONS = {torch.ops.myvision.my_add.default: my_add}
