"""layer_norm and rms_norm of nested tensors, which are a nested tensor of the norms of the components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor
from torch import Tensor

from myvision.ops import layer_norm, rms_norm

LAYOUTS = [torch.jagged, torch.strided]
NORMS = [layer_norm, rms_norm]
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def components(seed: int = 0) -> list[Tensor]:
    return [random_tensor(length, 4, 6, seed=seed + i) for i, length in enumerate((2, 5, 3))]


def nested(tensors: list[Tensor], layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=layout)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_components(norm: Callable[..., Tensor], layout: torch.layout, shape: tuple[int, ...]) -> None:
    weight = random_tensor(*shape, seed=9).requires_grad_()
    inputs = [[t.requires_grad_() for t in components()] for _ in range(2)]
    options: dict[str, Any] = {"activation": "gelu"}
    expected = [norm(t, shape, weight, **options) for t in inputs[0]]
    output = norm(nested(inputs[1], layout), shape, weight, **options)
    assert output.is_nested
    assert output.layout == layout
    torch.testing.assert_close(output.unbind(), tuple(expected))
    losses = [torch.stack([t.square().sum() for t in tensors]).sum() for tensors in (expected, output.unbind())]
    gradients = [torch.autograd.grad(loss, [weight, *leaves]) for loss, leaves in zip(losses, inputs, strict=True)]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_residuals(norm: Callable[..., Tensor], layout: torch.layout) -> None:
    input = nested(components(), layout)
    residual = input * 2  # in the jagged layout only tensors with the same offsets are of one shape
    expected = tuple(norm(t, 6, residual=t * 2) for t in components())
    torch.testing.assert_close(norm(input, 6, residual=residual).unbind(), expected)
    for wrong in (random_tensor(10, 4, 6), nested([*components(), random_tensor(1, 4, 6)], layout)):
        with pytest.raises(RuntimeError, match=f"{norm.__name__}: residual must "):
            norm(input, 6, residual=wrong)


def test_jagged_is_torchs() -> None:
    input = nested(components(), torch.jagged)
    for view, shape in ((input, (4, 6)), (input.transpose(1, 2), (6,))):
        expected = F.layer_norm(view, shape)
        output = layer_norm(view, shape)
        assert output.shape == expected.shape  # of the same ragged size, so that they add up
        torch.testing.assert_close((output - expected).values(), torch.zeros_like(output.values()))
    torch.testing.assert_close(rms_norm(input, (6,)).values(), F.rms_norm(input, (6,)).values())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_refused(norm: Callable[..., Tensor], layout: torch.layout) -> None:
    input = nested(components(), layout)
    with pytest.raises(RuntimeError, match=f"{norm.__name__}: normalized_shape must be"):
        norm(input, (5, 4, 6))
    with pytest.raises(RuntimeError, match=f"{norm.__name__}: input must be a dense tensor, but is a nested one"):
        norm(input, 4, channels="first")
    with pytest.raises(RuntimeError, match=f"{norm.__name__}: weight must be a dense tensor, but is a nested one"):
        norm(torch.ones(2, 6), 6, input)
