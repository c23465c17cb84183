"""Gradients of a function with regard to some of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def gradients_of(
    function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool], grad_outputs: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the wanted inputs of a differentiable function, differentiable themselves; None for the others.

    Args:
        function: ``function(*inputs)`` returns a tensor, or a list or tuple of tensors.
        inputs: tensors where wanted, anything otherwise.
        wanted: for each input, whether its gradient is.
        grad_outputs: the gradient of what the function returns, in the same form.
    """
    positions = [i for i, is_wanted in enumerate(wanted) if is_wanted]

    def of_wanted(*values: torch.Tensor) -> Any:
        varied = dict(enumerate(inputs)) | dict(zip(positions, values, strict=True))
        return function(*varied.values())

    pullback = torch.func.vjp(of_wanted, *(inputs[i] for i in positions))[1]
    found = dict(zip(positions, pullback(grad_outputs), strict=True))
    return tuple(found.get(i) for i in range(len(inputs)))
