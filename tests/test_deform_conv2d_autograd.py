"""deform_conv2d: derivatives of every order and direction, torch.func, autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deform_conv2d_cases import NAMES, Case
from helpers import HALF_DTYPES, run_fresh_python
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from myvision.ops import deform_conv2d

FIELD = Case(
    batch=1,
    in_channels=6,
    image=(5, 4),
    out_channels=2,
    kernel=(3, 2),
    stride=(2, 1),
    padding=(1, 0),
    dilation=(2, 1),
    groups=2,
    offset_groups=3,
    reach=1.0,
)


def leaves(case: Case, device: str = "cpu") -> list[Tensor | None]:
    return [None if t is None else t.requires_grad_() for t in case.tensors(torch.float64, device)]


def function(case: Case) -> Callable[..., Tensor]:
    return lambda *tensors: case.run(tensors)


@pytest.mark.parametrize("batch", [0, 1, 33])
def test_gradcheck(batch: int, device: str, fast_mode: bool) -> None:
    case = FIELD.but(batch=batch)
    assert gradcheck(
        function(case),
        leaves(case, device),
        check_forward_ad=True,
        check_batched_grad=True,
        check_undefined_grad=batch == 1,
        fast_mode=fast_mode or batch == 33,
        nondet_tol=1e-12 if device == "cuda" else 0,
    )


@pytest.mark.parametrize("batch", [0, 1, 33])
def test_gradgradcheck(batch: int, device: str) -> None:
    case = FIELD.but(batch=batch)
    assert gradgradcheck(
        function(case),
        leaves(case, device),
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        fast_mode=True,
        nondet_tol=1e-12 if device == "cuda" else 0,
    )


@pytest.mark.parametrize(
    "case", [FIELD.but(mask=False), FIELD.but(bias=False), FIELD.but(mask=False, bias=False)], ids=str
)
def test_gradcheck_without_optional_tensors(case: Case) -> None:
    present = [t for t in leaves(case) if t is not None]

    def call(*tensors: Tensor) -> Tensor:
        others = iter(tensors[3:])
        return case.run([*tensors[:3], next(others) if case.mask else None, next(others) if case.bias else None])

    assert gradcheck(call, present, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, present, fast_mode=True)


@pytest.mark.parametrize("wanted", range(5))
def test_one_tensor_needs_a_gradient(wanted: int) -> None:
    tensors = FIELD.tensors(torch.float64)
    tensors[wanted].requires_grad_()
    gradient, *nothing = torch.autograd.grad(FIELD.run(tensors).square().sum(), [tensors[wanted]], create_graph=True)
    assert not nothing
    every = leaves(FIELD)
    expected = torch.autograd.grad(FIELD.run(every).square().sum(), every)
    torch.testing.assert_close(gradient, expected[wanted])
    second = torch.autograd.grad(gradient.square().sum(), tensors[wanted])[0]
    oracle = FIELD.tensors(torch.float64)
    oracle[wanted].requires_grad_()
    first = torch.autograd.grad(FIELD.run_reference(oracle).square().sum(), oracle[wanted], create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), oracle[wanted])[0])


def test_third_derivative() -> None:
    def third(call: Callable[[list[Tensor]], Tensor]) -> Tensor:
        tensors = FIELD.tensors(torch.float64)
        result, offset = call([*tensors[:2], tensors[2].requires_grad_(), *tensors[3:]]).pow(3).sum(), tensors[2]
        for _ in range(2):
            result = torch.autograd.grad(result, offset, create_graph=True)[0].square().sum()
        return torch.autograd.grad(result, offset)[0]

    torch.testing.assert_close(third(FIELD.run), third(FIELD.run_reference))


@pytest.mark.parametrize("moving", range(5))
def test_forward_mode_is_never_zero_in_silence(moving: int) -> None:
    tensors = FIELD.tensors(torch.float64)
    with forward_ad.dual_level():
        tensors[moving] = forward_ad.make_dual(tensors[moving], torch.ones_like(tensors[moving]))
        actual = forward_ad.unpack_dual(FIELD.run(tensors)).tangent
        expected = forward_ad.unpack_dual(FIELD.run_reference(tensors)).tangent
    assert actual.any(), NAMES[moving]
    torch.testing.assert_close(actual, expected)


def by_offset(run: Callable[[list[Any]], Tensor]) -> Callable[[Tensor], Tensor]:
    input, weight, _, mask, bias = FIELD.tensors(torch.float64)
    return lambda offset: run([input, weight, offset, mask, bias]).square().sum()


@pytest.mark.parametrize("outer", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("inner", [torch.func.jacrev, torch.func.jacfwd])
def test_hessians(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    offset = FIELD.tensors(torch.float64)[2]
    expected = torch.func.hessian(by_offset(FIELD.run_reference))(offset)
    torch.testing.assert_close(outer(inner(by_offset(FIELD.run)))(offset), expected)


@pytest.mark.parametrize(
    "in_dims", [(0, None, 0, 0, None), (0, 0, 0, 0, 0), (None, 1, None, None, None), (2, 3, 1, 0, 1)]
)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    versions = [FIELD.tensors(torch.float64), [t.flip(0) * 0.5 for t in FIELD.tensors(torch.float64)]]
    batched = [
        first if dim is None else torch.stack([first, second], dim)
        for first, second, dim in zip(*versions, in_dims, strict=True)
    ]
    actual = torch.vmap(function(FIELD), in_dims)(*batched)
    expected = [
        FIELD.run([t if dim is None else t.select(dim, i) for t, dim in zip(batched, in_dims, strict=True)])
        for i in (0, 1)
    ]
    torch.testing.assert_close(actual, torch.stack(expected))


def test_vmap_has_rules_of_its_own() -> None:
    case = FIELD.but(batch=3, mask=False)
    input, weight, offset, _, bias = case.tensors(torch.float64)

    def loss(weight: Tensor, bias: Tensor, input: Tensor, offset: Tensor) -> Tensor:
        return case.run([input[None], weight, offset[None], None, bias]).square().sum()

    def per_sample(i: int) -> tuple[Tensor, ...]:
        return torch.func.grad(loss, (0, 1, 2, 3))(weight, bias, input[i], offset[i])

    gradients = torch.func.grad(loss, (0, 1, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's fall-back, one call after another, warns
        actual = torch.vmap(gradients, (None, None, 0, 0))(weight, bias, input, offset)
    expected = [torch.stack(tensors) for tensors in zip(*map(per_sample, range(3)), strict=True)]
    torch.testing.assert_close(list(actual), expected)


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_agrees_on_one_type(dtype: torch.dtype, device: str) -> None:
    case = Case()
    tensors = case.tensors(torch.float32, device)
    tensors[2] = tensors[2].to(dtype)  # as a convolution under autocast predicts it
    tensors = [t.requires_grad_() for t in tensors]
    with torch.autocast(device, dtype):
        output = case.run(tensors)
    assert output.dtype == dtype
    torch.testing.assert_close(output, case.run([t.to(dtype) for t in tensors]))
    output.sum().backward()
    for tensor in tensors:
        assert tensor.grad.dtype == tensor.dtype


def light_beside_the_sample(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """An input that is 1 in column 101 and else 0, an offset that takes sample 0 to column 100.3, and the weight 1."""
    input, offset = torch.zeros(1, 1, 1, 128, device=device), torch.zeros(1, 2, 1, 128, device=device)
    input[..., 101], offset[0, 1, 0, 0] = 1, 100.3
    return input.to(dtype), offset, torch.ones(1, 1, 1, 1, device=device)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_does_not_round_places(dtype: torch.dtype, input_dtype: torch.dtype, device: str) -> None:
    input, offset, weight = light_beside_the_sample(input_dtype, device)
    offset.requires_grad_()
    with torch.autocast(device, dtype):
        output = deform_conv2d(input, offset, weight)
    assert output.dtype == dtype
    torch.testing.assert_close(output[0, 0, 0, 0].item(), 0.3, rtol=torch.finfo(dtype).eps, atol=0)
    gradient = torch.autograd.grad(output[0, 0, 0, 0], offset)[0]
    assert gradient.dtype == torch.float32
    assert gradient[0, 1, 0, 0] == 1


def test_autocast_takes_offsets_of_another_half_type(device: str) -> None:
    case = Case()
    input, weight, offset, mask, bias = case.tensors(device=device)
    offset = offset.half()
    with torch.autocast(device, torch.bfloat16):
        actual = case.run([input, weight, offset, mask, bias])
    others = [tensor.bfloat16() for tensor in (input, weight, mask, bias)]
    torch.testing.assert_close(actual, case.run([*others[:2], offset.float(), *others[2:]]))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_derivatives_beside_float_offsets(dtype: torch.dtype, device: str) -> None:
    case = FIELD.but(float_offset=True)

    def derivatives(run: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
        tensors = [tensor.requires_grad_() for tensor in case.tensors(dtype, device)]
        first = torch.autograd.grad(run(tensors).float().square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(gradient.float().square().sum() for gradient in first), tensors)
        return [*first, *second]

    actual, expected = derivatives(case.run), derivatives(case.run_reference)
    tolerance = 8 * torch.finfo(dtype).eps
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        scale = other.double().abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


def test_vmap_beside_float_offsets() -> None:
    case = FIELD.but(float_offset=True)
    versions = [case.tensors(torch.bfloat16), [t.flip(0) * 0.5 for t in case.tensors(torch.bfloat16)]]
    actual = torch.vmap(function(case))(*(torch.stack(pair) for pair in zip(*versions, strict=True)))
    torch.testing.assert_close(actual, torch.stack([case.run(tensors) for tensors in versions]))


def test_autocast_leaves_float64_alone(device: str) -> None:
    with torch.autocast(device, torch.bfloat16):
        assert Case().run(Case().tensors(torch.float64, device)).dtype == torch.float64


def test_mixed_types_without_autocast() -> None:
    input, weight, offset, mask, bias = Case().tensors()
    with pytest.raises(RuntimeError, match="offset must have the dtype of input, float32, but has bfloat16"):
        Case().run([input, weight, offset.bfloat16(), mask, bias])


def test_derivatives_without_private_names() -> None:
    """Where torch lacks a name that the lean registration needs, the public one gives the same derivatives."""
    run_fresh_python(
        """
import torch, torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function  # a private name that a later torch may not have
import myvision._dispatch.autograd
assert not myvision._dispatch.autograd._LEAN
from torch.autograd import gradcheck, gradgradcheck
from test_deform_conv2d_autograd import FIELD, function, leaves
assert gradcheck(function(FIELD), leaves(FIELD), check_forward_ad=True, fast_mode=True)
assert gradgradcheck(function(FIELD), leaves(FIELD), fast_mode=True)
"""
    )
