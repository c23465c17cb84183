"""Fakes: what an operator returns for tensors without data, and what it rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from myvision._dispatch.arguments import arguments_of

_onnx_translations_given = False


def note_onnx_translations() -> None:
    """An export to ONNX may know the operators from now on."""
    global _onnx_translations_given
    _onnx_translations_given = True


def register_fake(fake: Callable[[Any], Any], *ops: torch._ops.OpOverload) -> None:
    """Gives operators of the same arguments their fake.

    Args:
        fake: ``fake(arguments)`` gets the arguments by name and returns a tensor, a tuple of all results, or None
            for an operator that only writes to its arguments.
        *ops: each returns as many of the results as its schema has.
    """
    for op in ops:
        torch.library.register_fake(op, _of(fake, op))


def _of(fake: Callable[[Any], Any], op: torch._ops.OpOverload) -> Callable[..., Any]:
    arguments, count = arguments_of(op), len(op._schema.returns)

    def call(*args: Any) -> Any:
        if torch.onnx.is_in_onnx_export() and not _onnx_translations_given:
            raise RuntimeError(
                f"{op.name()}: torch.onnx.export knows no operator of myvision: call myvision.onnx.export, or pass it "
                "custom_translation_table=myvision.onnx.translation_table()"
            )
        results = fake(arguments(*args))
        if results is None or isinstance(results, torch.Tensor):
            return results
        return results[0] if count == 1 else results[:count]

    return call
