"""Export to ONNX with every operator of myvision as one node.

``deform_conv2d`` becomes ONNX's own ``DeformConv``; a norm becomes ONNX's own node with Add and the activation behind,
or its formula where ONNX has no such node; attention becomes ``Attention``, its options a mask. ``my_add``, which ONNX
does not have, becomes ``myvision::my_add``, and the model carries its function body, so any runtime runs it. Needs the
packages of the extra ``myvision[onnx]``.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from myvision._dispatch.arguments import arguments_of
from myvision._dispatch.fake import note_onnx_translations
from myvision.onnx._graph import DOMAIN, Opset, Translation, UnsupportedError

__all__ = ["DEFAULT_OPSET", "add_function_bodies", "export", "translation_table"]

DEFAULT_OPSET = 20  # what torch.onnx.export targets by itself; DeformConv came with 19


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
    from onnxscript import values

    note_onnx_translations()
    op = values.Opset("", opset)
    return {
        overload: _bind(function, overload, op)
        for module in _modules()
        for overload, function in module.TRANSLATIONS.items()
    }


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
    graphs: list[onnx_ir.Graph | onnx_ir.Function] = [model.graph, *model.functions.values()]
    called = {node.op_identifier() for graph in graphs for node in onnx_ir.traversal.RecursiveGraphIterator(graph)}
    for module in _modules():
        if text := getattr(module, "FUNCTION_BODY", None):
            proto = onnx.parser.parse_function(text.format(opset=model.opset_imports[""]))
            body = onnx_ir.serde.deserialize_function(proto)
            if body.identifier() in called:
                model.functions[body.identifier()] = body
                model.opset_imports.setdefault(DOMAIN, 1)
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


def _bind(function: Translation, overload: torch._ops.OpOverload, op: Opset) -> Translation:
    """The translation as the exporter calls it: with the operator's arguments in the order of its schema."""
    arguments = arguments_of(overload)

    def translation(*args: Any) -> Any:
        return function(op, **arguments(*args)._asdict())

    return translation


def _modules() -> Iterator[Any]:
    """Those of the operators: one a file, with TRANSLATIONS and, where ONNX has no such node, FUNCTION_BODY."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            yield import_module(f"{__name__}.{module.name}")


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
