"""add_layer_norm and add_rms_norm: the sum, and dropout, which both share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import num_threads, random_tensor, with_layout
from norm_cases import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import myvision
from myvision._formulas._dropout import keep_mask

BOTH = ["add_layer_norm", "add_rms_norm"]


@pytest.fixture(params=BOTH)
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def call(op: str, input: Tensor, residual: Tensor, p: float = 0.0, training: bool = True) -> tuple[Tensor, Tensor]:
    return getattr(myvision.ops, op)(input, residual, input.shape[-1:], dropout_p=p, training=training)


def kept(op: str, shape: tuple[int, ...], p: float, **options: Any) -> Tensor:
    """Which ones of a tensor of ones came through."""
    ones = torch.ones(shape, **options)
    return call(op, ones, torch.zeros_like(ones), p)[1] != 0


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 64), (4, 1), (3, 768)], ids=str)
def test_is_the_sum_and_its_norm(op: str, shape: tuple[int, ...], device: str) -> None:
    input, residual = (random_tensor(*shape, device=device, seed=seed) for seed in (1, 2))
    weight, bias = (random_tensor(*shape[-1:], device=device, seed=seed) for seed in (3, 4))
    sum = input + residual
    if op == "add_layer_norm":
        actual = myvision.ops.add_layer_norm(input, residual, shape[-1:], weight, bias)
        expected = F.layer_norm(sum, shape[-1:], weight, bias)
    else:
        actual = myvision.ops.add_rms_norm(input, residual, shape[-1:], weight)
        expected = F.rms_norm(sum, shape[-1:], weight)
    torch.testing.assert_close(actual, (expected, sum))


def test_the_sum_is_rounded_once_and_normalised_as_it_is(op: str, floating_dtype: torch.dtype, device: str) -> None:
    input, residual = (random_tensor(4, 70, dtype=floating_dtype, device=device, seed=seed) for seed in (1, 2))
    output, sum = call(op, input, residual)
    assert torch.equal(sum, input + residual)
    norm = myvision.ops.layer_norm if op == "add_layer_norm" else myvision.ops.rms_norm
    torch.testing.assert_close(output, norm(sum, (70,)))


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should(op: str, p: float, device: str) -> None:
    mask = kept(op, (200, 500), p, device=device)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.double().mean().item() - (1 - p)) < 5 * deviation
    for dim in (0, 1):  # no row and no column stands out
        means = mask.double().mean(dim)
        assert (means - (1 - p)).abs().max() < 6 * (p * (1 - p) / mask.shape[dim]) ** 0.5
    neighbours = (mask[:, 1:] & mask[:, :-1]).double().mean().item()
    assert abs(neighbours - (1 - p) ** 2) < 5 * deviation


def test_dropout_scales_what_it_keeps(op: str, floating_dtype: torch.dtype, device: str) -> None:
    input, residual = (random_tensor(9, 33, dtype=floating_dtype, device=device, seed=seed) for seed in (1, 2))
    sum = call(op, input, residual, 0.25)[1]
    dropped = sum == residual
    assert 0.1 < dropped.double().mean() < 0.4
    torch.testing.assert_close(
        sum, torch.where(dropped, residual, (input.double() / 0.75 + residual).to(floating_dtype))
    )


def test_dropout_of_everything(op: str, device: str) -> None:
    input, residual = (random_tensor(5, 7, device=device, seed=seed).requires_grad_() for seed in (1, 2))
    output, sum = call(op, input, residual, 1.0)
    assert torch.equal(sum, residual)
    output.sum().backward()
    assert not input.grad.any()


def test_no_dropout_in_evaluation(op: str, device: str) -> None:
    input, residual = (random_tensor(5, 7, device=device, seed=seed) for seed in (1, 2))
    state = torch.get_rng_state()
    torch.testing.assert_close(
        call(op, input, residual, 0.5, training=False), call(op, input, residual), rtol=0, atol=0
    )
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn where nothing is dropped"


def test_the_seed_of_torch_reproduces_it(op: str, device: str) -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append([kept(op, (7, 33), 0.5, device=device) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
    assert not torch.equal(masks[0][0], masks[0][1]), "each call has a mask of its own"
    assert not torch.equal(masks[0][0], masks[2][0])


def arguments(op: str, input: Tensor, residual: Tensor, p: float, seed: int) -> tuple[Any, ...]:
    """Of the operator itself, without parameters."""
    parameters = (None, None) if op == "add_layer_norm" else (None,)
    return input, residual, list(input.shape[-1:]), *parameters, 1e-5, p, torch.tensor(seed, device=input.device)


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (9, 1), (1, 1031)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_that_of_the_reference(op: str, seed: int, shape: tuple[int, ...], p: float, device: str) -> None:
    for dtype in (torch.float32, torch.float16):  # a GPU's threads hold 4 of the one and 8 of the other
        ones = torch.ones(shape, device=device, dtype=dtype)
        sum = getattr(torch.ops.myvision, op)(*arguments(op, ones, torch.zeros_like(ones), p, seed))[1]
        assert torch.equal(sum != 0, keep_mask(ones, p, torch.tensor(seed, device=device)))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced"])
def test_the_mask_does_not_depend_on_the_layout(op: str, layout: str, device: str) -> None:
    input = random_tensor(2, 3, 5, 7, device=device)
    residual = random_tensor(2, 3, 5, 7, device=device, seed=1)
    operator = getattr(torch.ops.myvision, op)
    expected = operator(*arguments(op, input, residual, 0.4, 11))
    laid_out = operator(*arguments(op, with_layout(input, layout), with_layout(residual, layout), 0.4, 11))
    torch.testing.assert_close(laid_out, expected, rtol=0, atol=1e-5)
    assert torch.equal(laid_out[1], expected[1])


def test_the_mask_does_not_depend_on_threads_and_type(op: str) -> None:
    masks = []
    for count in (1, 2, 3):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            torch.manual_seed(3)
            with num_threads(count):
                masks.append(kept(op, (300, 257), 0.5, dtype=dtype))
    assert all(torch.equal(masks[0], mask) for mask in masks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_recomputes_the_mask(op: str, dtype: torch.dtype, device: str) -> None:
    """Against the reference with the same seed, of both outputs' gradients."""
    case = Case(op, (6, 70))
    input, residual, *rest = arguments(op, *(case.tensors(dtype, device)[i] for i in (0, 3)), 0.3, 7)
    grad_outputs = case.grad_outputs(dtype, device)
    gradients = []
    for function in (getattr(torch.ops.myvision, op), reference(op)):
        leaves = [t.detach().requires_grad_() for t in (input, residual)]
        outputs = function(*leaves, *rest)
        gradients.append([*outputs, *torch.autograd.grad(outputs, leaves, grad_outputs)])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*gradients, **tolerance)
    assert torch.equal(gradients[0][2] == 0, ~keep_mask(input, 0.3, torch.tensor(7, device=device)))


def reference(op: str) -> Any:
    return getattr(import_module(f"myvision._formulas.{op}"), op)


def test_derivatives_with_dropout(op: str) -> None:
    inputs = [random_tensor(3, 6, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2)]

    def function(input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(torch.ops.myvision, op)(*arguments(op, input, residual, 0.4, 13))

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_dropout_under_checkpointing(op: str) -> None:
    """The forward pass that runs again drops the same elements."""
    input, residual = (random_tensor(8, 33, seed=seed).requires_grad_() for seed in (1, 2))

    def loss(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(5)
        run = (lambda *args: checkpoint(call, *args, use_reentrant=False)) if checkpointed else call
        outputs = run(op, input, residual, 0.5)
        return list(torch.autograd.grad(sum(output.square().sum() for output in outputs), [input, residual]))

    torch.testing.assert_close(loss(True), loss(False), rtol=0, atol=0)


def test_opcheck_with_dropout(op: str, device: str) -> None:
    input, residual = (random_tensor(3, 6, device=device, seed=seed).requires_grad_() for seed in (1, 2))
    operator = getattr(torch.ops.myvision, op).default
    torch.library.opcheck(operator, arguments(op, input, residual, 0.3, 7))


def test_dropout_in_a_compiled_graph(op: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: call(op, x, y, 0.5), fullgraph=True, dynamic=True, backend="aot_eager")
    ones = torch.ones(40, 50)
    masks = [compiled(ones, torch.zeros(40, 50))[1] != 0 for _ in range(2)]
    assert not torch.equal(*masks), "a graph draws a new seed in every run"
    assert all(0.3 < mask.double().mean() < 0.7 for mask in masks)
    input, residual = (random_tensor(8, 33, seed=seed).requires_grad_() for seed in (1, 2))
    sum = compiled(input, residual)[1]
    (gradient,) = torch.autograd.grad(sum.sum(), input)
    assert torch.equal(gradient != 0, sum != residual)


def test_vmap_over_dropout(op: str) -> None:
    """As of torch's dropout, samples that are to have masks of their own must say so."""
    ones = torch.ones(4, 8, 64)
    different = torch.vmap(lambda x: call(op, x, torch.zeros_like(x), 0.5)[1] != 0, randomness="different")(ones)
    assert not torch.equal(different[0], different[1])
    same = torch.vmap(lambda x: call(op, x, torch.zeros_like(x), 0.5)[1] != 0, randomness="same")(ones)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(lambda x: call(op, x, torch.zeros_like(x), 0.5)[1])(ones)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_bad_probabilities(op: str, p: float) -> None:
    with pytest.raises((RuntimeError, ValueError), match="dropout_p must be between 0 and 1"):
        call(op, torch.ones(2, 3), torch.ones(2, 3), p)
