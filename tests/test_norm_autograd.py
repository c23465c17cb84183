"""The norms: derivatives of every order and direction, torch.func, autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, random_tensor, run_fresh_python
from norm_cases import ACTIVATIONS, CASES, NAMES, WITH_ACTIVATION, Case
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

SMALL = [case.but(shape=(2, 4, 3, 2), groups=2) for case in CASES]
SMOOTH = [case.but(activation="silu" if case.has_activation else None) for case in SMALL]


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors[:4] if tensor is not None]


def leaves(case: Case, device: str = "cpu") -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in present(case.tensors(torch.float64, device))]


def function(case: Case, device: str = "cpu", reference: bool = False) -> Callable[..., Any]:
    """Of the tensors that have gradients."""
    fixed = case.tensors(torch.float64, device)

    def call(*tensors: Tensor) -> Any:
        given = iter(tensors)
        merged = [None if t is None else next(given) for t in fixed[:4]] + fixed[4:]
        outputs = (case.run_reference if reference else case.run)(merged)
        return outputs if case.adds else outputs[0]

    return call


def scalar(call: Callable[..., Any]) -> Callable[..., Tensor]:
    """A loss that has derivatives of every order."""

    def loss(*tensors: Tensor) -> Tensor:
        outputs = call(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum((output.pow(3).sum() for output in outputs), torch.zeros(()))

    return loss


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_gradcheck(case: Case, device: str, fast_mode: bool) -> None:
    assert gradcheck(
        function(case, device),
        leaves(case, device),
        fast_mode=fast_mode,
        check_forward_ad=True,
        check_batched_grad=True,
        check_undefined_grad=True,
    )


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_gradgradcheck(case: Case, device: str) -> None:
    assert gradgradcheck(
        function(case, device), leaves(case, device), check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


@pytest.mark.parametrize("case", [case for case in CASES if case.training], ids=str)
def test_second_derivatives_and_tangents_of_huge_numbers(case: Case) -> None:
    """Numbers 2^k times as large have the same tangent in a direction 2^k times as large, and so on."""
    case, huge = case.but(shape=(2, 4, 3, 5), groups=2, activation="silu" if case.has_activation else None), 2.0**70
    tensors = case.but(eps=0.0).tensors(torch.float32)
    if case.adds:
        tensors[3] = torch.zeros_like(tensors[3])
    direction = random_tensor(*case.shape, seed=7)

    def derivatives(run: Callable[..., Any], dtype: torch.dtype, scale: float) -> list[Tensor]:
        input, *others = (t if t is None else t.to(dtype) for t in tensors)
        along = direction.to(dtype) * scale
        with forward_ad.dual_level():
            output = run([forward_ad.make_dual(input * scale, along), *others])[0]
            tangent = forward_ad.unpack_dual(output).tangent
        leaf = (input * scale).requires_grad_()
        (gradient,) = torch.autograd.grad(run([leaf, *others])[0].pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((gradient * along).sum(), leaf)
        return [tangent.double(), second.double() * scale]

    actual = derivatives(case.run, torch.float32, huge)
    expected = derivatives(case.but(eps=0.0).run_reference, torch.float64, 1.0)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("case", WITH_ACTIVATION, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_of_every_activation(case: Case, activation: str | None) -> None:
    case = case.but(shape=(2, 4, 3, 2), groups=2, activation=activation)
    assert gradcheck(function(case), leaves(case), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function(case), leaves(case), fast_mode=True)


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize("wanted", NAMES)
def test_one_tensor_needs_a_gradient(case: Case, wanted: str) -> None:
    tensors = case.tensors(torch.float64)
    tensor = tensors[NAMES.index(wanted)]
    if tensor is None:
        pytest.skip("has none")
    tensor.requires_grad_()
    loss = sum(output.pow(2).sum() for output in case.run(tensors))
    gradient = torch.autograd.grad(loss, tensor, create_graph=True)[0]
    expected = torch.autograd.grad(sum(output.pow(2).sum() for output in case.run_reference(tensors)), tensor)[0]
    torch.testing.assert_close(gradient, expected)
    assert torch.autograd.grad(gradient.pow(2).sum(), tensor)[0].isfinite().all()


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_only_needed_gradients_are_computed(case: Case) -> None:
    for wanted in range(4):
        tensors = case.tensors(torch.float64)
        if tensors[wanted] is None:
            continue
        tensors[wanted].requires_grad_()
        outputs = case.run(tensors)
        gradients = outputs[0].grad_fn.apply(*[torch.ones_like(output) for output in outputs])
        one_for_both = case.adds and wanted in (0, 3)  # the gradient of a sum is that of both terms
        assert sum(gradient is not None for gradient in gradients) == 1 + one_for_both


@pytest.mark.parametrize("case", [case for case in SMOOTH if case.adds], ids=str)
@pytest.mark.parametrize("output", [0, 1])
def test_gradients_of_one_output_alone(case: Case, output: int, device: str) -> None:
    actual, expected = (
        torch.autograd.grad(
            function(case, device, reference)(*tensors)[output].pow(2).sum(), tensors, materialize_grads=True
        )
        for tensors in [leaves(case, device)]
        for reference in (False, True)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_third_derivative(case: Case) -> None:
    def third(call: Callable[..., Tensor]) -> Tensor:
        tensors = leaves(case)
        result = scalar(call)(*tensors)
        for _ in range(2):
            result = torch.autograd.grad(result, tensors[0], create_graph=True)[0].square().sum()
        return torch.autograd.grad(result, tensors[0])[0]

    torch.testing.assert_close(third(function(case)), third(function(case, reference=True)))


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize("moving", range(4))
def test_forward_mode_is_never_zero_in_silence(case: Case, moving: int) -> None:
    tensors = [tensor.detach() for tensor in leaves(case)]
    if moving >= len(tensors):
        pytest.skip("has none")
    tangent = random_tensor(*tensors[moving].shape, dtype=torch.float64, seed=7)
    with forward_ad.dual_level():
        tensors[moving] = forward_ad.make_dual(tensors[moving], tangent)
        tangents = []
        for reference in (False, True):
            outputs = function(case, reference=reference)(*tensors)
            outputs = outputs if case.adds else (outputs,)
            tangents.append([forward_ad.unpack_dual(output).tangent for output in outputs])
    assert tangents[0][0].any()
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize("outer", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("inner", [torch.func.jacrev, torch.func.jacfwd])
def test_hessians(case: Case, outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    tensors = [tensor.detach() for tensor in leaves(case)]
    expected = torch.func.hessian(scalar(function(case, reference=True)))(*tensors)
    torch.testing.assert_close(outer(inner(scalar(function(case))))(*tensors), expected)


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, None, None, 0), (None, 0, None, None), (2, 1, 0, 1)], ids=str)
def test_vmap(case: Case, in_dims: tuple[int | None, ...]) -> None:
    versions = [[tensor.detach() * scale for tensor in leaves(case)] for scale in (1.0, -0.5, 2.0)]
    dims = [dim for dim, tensor in zip(in_dims, case.tensors()[:4], strict=True) if tensor is not None]
    if all(dim is None for dim in dims):
        pytest.skip("nothing to map over")
    batched = [
        tensors[0] if dim is None else torch.stack(tensors, dim)
        for tensors, dim in zip(zip(*versions, strict=True), dims, strict=True)
    ]
    expected = torch.vmap(function(case, reference=True), tuple(dims))(*batched)
    torch.testing.assert_close(torch.vmap(function(case), tuple(dims))(*batched), expected)


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_gradients_of_each_sample(case: Case) -> None:
    """Of batches of one image, by rules of our own: torch's fall-back, one call after another, warns."""
    input, *others = [tensor.detach() for tensor in leaves(case)]
    parameters, residual = others[: len(others) - (case.residual or case.adds)], others[-1]

    def loss(run: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *tensors: scalar(run)(*tensors)

    samples = torch.stack([input, input.flip(0) * 0.5, input + 1])
    residuals = torch.stack([residual, residual.flip(0), residual * 2])
    dims = (0, *[None] * len(parameters), 0)
    wanted = tuple(range(len(dims)))
    arguments = (samples, *parameters, residuals)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = torch.vmap(torch.func.grad(loss(function(case)), wanted), dims)(*arguments)
    expected = torch.vmap(torch.func.grad(loss(function(case, reference=True)), wanted), dims)(*arguments)
    torch.testing.assert_close(actual, expected)


def test_jvp_and_linearize() -> None:
    case = SMOOTH[0]
    tensors = tuple(tensor.detach() for tensor in leaves(case))
    tangents = tuple(random_tensor(*t.shape, dtype=torch.float64, seed=9) for t in tensors)
    expected = torch.func.jvp(function(case, reference=True), tensors, tangents)
    torch.testing.assert_close(torch.func.jvp(function(case), tensors, tangents), expected)


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_gradients_have_the_type_of_their_tensor(case: Case, dtype: torch.dtype, device: str) -> None:
    case = case.but(parameter_dtype=torch.float32)
    tensors = case.tensors(dtype, device)
    for gradient, tensor in zip(
        case.gradients(tensors, case.grad_outputs(dtype, device)), present(tensors), strict=True
    ):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_autocast_leaves_the_input_in_its_type(case: Case, dtype: torch.dtype, device: str) -> None:
    """As a fused kernel can: half in, half out, computed in float32; and float32 stays what it is."""
    for input_dtype in (dtype, torch.float32, torch.float64):
        tensors = case.but(parameter_dtype=torch.float32).tensors(input_dtype, device)
        with torch.autocast(device, dtype):
            outputs = case.run(tensors)
        torch.testing.assert_close(outputs, case.run(tensors), rtol=0, atol=0)
        assert all(output.dtype == input_dtype for output in outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_autocast_agrees_on_one_type(case: Case, device: str) -> None:
    """A residual stream in float32 beside a branch that a product left in bfloat16: a sum takes the wider type."""
    tensors = case.tensors(torch.float32, device)
    mixed = [tensors[0].bfloat16(), *tensors[1:]]
    mixed = [t if t is None else t.requires_grad_() for t in mixed[:4]] + mixed[4:]
    with torch.autocast(device, torch.bfloat16):
        outputs = case.run(mixed)
    assert all(output.dtype == (torch.float32 if case.adds else torch.bfloat16) for output in outputs)
    sum(output.sum() for output in outputs).backward()
    for tensor in present(mixed):
        assert tensor.grad.dtype == tensor.dtype


def test_derivatives_without_private_names() -> None:
    """Where torch lacks a name that the lean registration needs, the public one gives the same derivatives."""
    run_fresh_python(
        """
import torch, torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function  # a private name that a later torch may not have
import myvision._dispatch.autograd
assert not myvision._dispatch.autograd._LEAN
from torch.autograd import gradcheck, gradgradcheck
from test_norm_autograd import SMOOTH, function, leaves
for case in SMOOTH:
    assert gradcheck(function(case), leaves(case), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function(case), leaves(case), fast_mode=True)
"""
    )


def test_what_backward_keeps_has_no_gradient() -> None:
    """The statistics that forward returns beside its result, to levels of torch.func and to whoever calls it."""
    x = random_tensor(2, 4, 3).requires_grad_()
    ops, options = torch.ops.myvision, (1e-5, None, 0.0)
    for output, statistics in (
        ops._layer_norm_forward(x, [3], None, None, None, False, *options),
        ops._batch_norm_forward(x, None, None, None, None, None, *options),
        ops._group_norm_forward(x, 2, None, None, None, *options),
    ):
        assert output.requires_grad
        assert not statistics.requires_grad
