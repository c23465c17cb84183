"""Export to ONNX with every operator of myvision as one node.

``deform_conv2d`` becomes ONNX's own ``DeformConv``; a norm becomes ONNX's own node with Add and the activation behind,
or its formula where ONNX has no such node; attention becomes ``Attention``, its options a mask. ``my_add``, which ONNX
does not have, becomes ``myvision::my_add``, and the model carries its function body, so any runtime runs it. Needs the
packages of the extra ``myvision[onnx]``.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from myvision.onnx._elementwise import promoted
from myvision.onnx._norms import UnsupportedError, norm_translations
from myvision.onnx.attention import attention_translations

__all__ = ["DEFAULT_OPSET", "add_function_bodies", "export", "translation_table"]

DEFAULT_OPSET = 20  # what torch.onnx.export targets by itself; DeformConv came with 19

_DOMAIN = "myvision"

# x + x is exact in every type; a product with 2 would need a constant of the type of x.
_MY_ADD_BODY = """
<domain: "myvision", opset_import: ["": {opset}]>
my_add (x, y) => (output) {{
    twice_x = Add(x, x)
    output = Add(twice_x, y)
}}
"""
_MY_ADD_TYPES = ("double", "float", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")

Value = Any  # a value of the graph that onnxscript builds
Translation = Callable[..., Value]


def translation_table(opset: int = DEFAULT_OPSET) -> dict[Callable[..., Any], Translation]:
    """Map each operator of myvision to the function that writes its ONNX node.

    The table suits ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``. Where a model uses
    ``my_add``, call :func:`add_function_bodies` on the result; :func:`export` does both.

    Args:
        opset: version of the ONNX operators that the export targets.

    Returns:
        The table, from ``torch.ops.myvision.<operator>.default`` to an onnxscript function.

    Raises:
        ImportError: onnx or onnxscript is missing.

    Example:
        >>> table = myvision.onnx.translation_table(20)
        >>> program = torch.onnx.export(model, (x,), dynamo=True, opset_version=20, custom_translation_table=table)
    """
    for package in ("onnx", "onnxscript"):
        try:
            import_module(package)
        except ImportError as error:
            raise ImportError(f"ONNX export needs {package}: pip install 'myvision[onnx]' ({error})") from error
    operators = torch.ops.myvision
    return {
        operators.my_add.default: _my_add_translation(opset),
        operators.deform_conv2d.default: _deform_conv2d_translation(opset),
        **norm_translations(opset),
        **attention_translations(opset),
        **_translations_of_modules(),
    }


def _translations_of_modules() -> dict[Callable[..., Any], Translation]:
    """Those of operators that have a file of their own here, with a table named TRANSLATIONS."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {operator: write for module in modules for operator, write in getattr(module, "TRANSLATIONS", {}).items()}


def add_function_bodies(program: torch.onnx.ONNXProgram) -> torch.onnx.ONNXProgram:
    """Add to a model the body of each operator of myvision that it calls, in place.

    Args:
        program: what ``torch.onnx.export`` returned, given :func:`translation_table`.

    Returns:
        The same program.

    Example:
        >>> program = torch.onnx.export(model, (x,), dynamo=True, custom_translation_table=table)
        >>> myvision.onnx.add_function_bodies(program).save("model.onnx")
    """
    import onnx
    import onnx_ir

    model = program.model
    proto = onnx.parser.parse_function(_MY_ADD_BODY.format(opset=model.opset_imports[""]))
    body = onnx_ir.serde.deserialize_function(proto)
    graphs: list[onnx_ir.Graph | onnx_ir.Function] = [model.graph, *model.functions.values()]
    nodes = (node for graph in graphs for node in onnx_ir.traversal.RecursiveGraphIterator(graph))
    if any(node.op_identifier() == body.identifier() for node in nodes):
        model.functions[body.identifier()] = body
        model.opset_imports.setdefault(_DOMAIN, 1)
    return program


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    opset_version: int | None = None,
    custom_translation_table: Mapping[Callable[..., Any], Translation] | None = None,
    export_params: bool = True,
    keep_initializers_as_inputs: bool = False,
    external_data: bool = True,
    **kwargs: Any,
) -> torch.onnx.ONNXProgram:
    """Export a model to ONNX by :func:`torch.onnx.export`, each operator of myvision as one node.

    Args:
        model: the module, or what ``torch.export.export`` returned for it.
        args: example inputs.
        f: where to save the model too, as ``program.save(f)`` does. Default: nowhere.
        opset_version: version of the ONNX operators. Default: 20; ``deform_conv2d`` needs 19, in bfloat16 22.
        custom_translation_table: translations of further operators; they take precedence over those of myvision.
        export_params, keep_initializers_as_inputs, external_data: how to save to ``f``, as in torch.
        **kwargs: the further arguments of :func:`torch.onnx.export`, such as ``dynamic_shapes`` and ``input_names``.

    Returns:
        The ``torch.onnx.ONNXProgram``: ``.save(path)`` writes it, calling it runs it in onnxruntime.

    Raises:
        ImportError: onnx or onnxscript is missing.
        ValueError: ``opset_version`` is too old for an operator of the model, or a norm is in training.
        TypeError: ``dynamo=False`` or ``verify=True``, which this export cannot do.
        torch.onnx.OnnxExporterError: torch cannot export the model.

    Example:
        >>> dynamic = torch.export.Dim.DYNAMIC
        >>> program = myvision.onnx.export(model.eval(), (x,), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},))
        >>> program.save("model.onnx")
    """
    _check_arguments(**kwargs)
    opset = opset_version or DEFAULT_OPSET
    table = {**translation_table(opset), **(custom_translation_table or {})}
    kwargs |= {"dynamo": True, "opset_version": opset, "custom_translation_table": table}
    try:
        program = torch.onnx.export(model, args, **kwargs)
    except torch.onnx.OnnxExporterError as error:
        if cause := _own_cause(error):
            raise cause from None
        if "auto_functionalized" in str(error) and "myvision" in str(error):
            raise UnsupportedError(
                "a norm of the model updates its running statistics, which has no form in ONNX: call model.eval() first"
            ) from error
        raise
    assert program is not None  # only torch's older exporter returns nothing
    add_function_bodies(program)
    if f is not None:
        program.save(
            f,
            include_initializers=export_params,
            keep_initializers_as_inputs=keep_initializers_as_inputs,
            external_data=external_data,
        )
    return program


def _my_add_translation(opset: int) -> Translation:
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    op = Opset("", opset)
    # The exporter inlines each function it knows: so the node is written bare, and its body is added at the end.
    x, y, output = (OpSchema.FormalParameter(name, "T") for name in ("x", "y", "output"))
    types = ("T", [f"tensor({name})" for name in _MY_ADD_TYPES], "any number")
    schema = OpSchema("my_add", _DOMAIN, 1, inputs=[x, y], outputs=[output], type_constraints=[types])
    node = Op(Opset(_DOMAIN, 1), "my_add", schema)

    def my_add(x: Value, y: Value) -> Value:
        return node(*promoted(op, x, y))

    return my_add


def _deform_conv2d_translation(opset: int) -> Translation:
    from onnxscript.values import Opset

    op = Opset("", opset)

    def deform_conv2d(
        input: Value,
        weight: Value,
        offset: Value,
        mask: Value,
        bias: Value,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        offset_groups: int,
    ) -> Value:
        if opset < 19:
            raise UnsupportedError(f"deform_conv2d needs ONNX opset 19 or later, got opset_version={opset}")
        if opset < 22 and input.dtype.name == "BFLOAT16":
            raise UnsupportedError(f"deform_conv2d of bfloat16 needs ONNX opset 22 or later, got {opset}")
        return op.DeformConv(
            input,
            weight,
            offset,
            bias,
            mask,
            strides=stride,
            pads=[*padding, *padding],  # in front of each axis, then behind each
            dilations=dilation,
            group=groups,
            offset_group=offset_groups,
        )

    return deform_conv2d


def _check_arguments(*, dynamo: bool = True, verify: bool = False, **_: Any) -> None:
    if not dynamo:
        raise TypeError("dynamo=False: torch's older exporter knows no translation table")
    if verify:
        raise TypeError(
            "verify=True: the model is not complete before the export ends; "
            "call torch.onnx.verification.verify_onnx_program on what it returns"
        )


def _own_cause(error: BaseException | None) -> UnsupportedError | None:
    """Find our own error among the causes of one that torch wrapped around it."""
    while error is not None and not isinstance(error, UnsupportedError):
        error = error.__cause__
    return error
