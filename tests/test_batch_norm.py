"""batch_norm: what sets it apart from the other norms, which is its running statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import num_threads, random_tensor, with_layout
from norm_cases import Case
from torch._subclasses import FakeTensorMode

from myvision._formulas.batch_norm import batch_norm_update as reference_update
from myvision.ops import batch_norm

SHAPES = [(4, 6), (4, 6, 7), (3, 6, 5, 4), (2, 6, 2, 3, 4)]


def statistics(
    channels: int = 6, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    mean = random_tensor(channels, dtype=dtype, device=device, seed=4)
    return mean, random_tensor(channels, dtype=dtype, device=device, seed=5).abs() + 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
def test_is_torchs_function(shape: tuple[int, ...], training: bool, momentum: float, device: str) -> None:
    input, weight, bias = random_tensor(*shape, device=device), *statistics(device=device)
    ours, theirs = (statistics(device=device) for _ in range(2))
    expected = F.batch_norm(input, *theirs, weight, bias, training, momentum)
    torch.testing.assert_close(batch_norm(input, *ours, weight, bias, training, momentum), expected)
    torch.testing.assert_close(ours, theirs)


def test_defaults_are_torchs() -> None:
    input, (mean, var) = random_tensor(3, 6, 5), statistics()
    torch.testing.assert_close(batch_norm(input, mean, var), F.batch_norm(input, mean, var))
    expected = F.batch_norm(input, None, None, training=True)
    torch.testing.assert_close(batch_norm(input, None, None, training=True), expected)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced"])
@pytest.mark.parametrize("statistics_dtype", [None, torch.float32, torch.bfloat16])
def test_running_statistics(
    floating_dtype: torch.dtype, statistics_dtype: torch.dtype | None, layout: str, device: str
) -> None:
    """Unbiased, of any type, and right to the last digit but one."""
    input = with_layout(random_tensor(4, 6, 5, 9, dtype=floating_dtype, device=device) * 3 + 1, layout)
    running = statistics(6, statistics_dtype or floating_dtype, device)
    expected = tuple(t.double() for t in running)
    batch_norm(input, *running, None, None, True, 0.3)
    reference_update(input.double(), *expected, None, None, None, 0.3, 1e-5, None, 0.0)
    tolerance = 4 * torch.finfo(running[0].dtype).eps
    for actual, oracle in zip(running, expected, strict=True):
        torch.testing.assert_close(actual.double(), oracle, rtol=tolerance, atol=tolerance)


def test_statistics_are_those_before_the_activation(device: str) -> None:
    input, residual = random_tensor(3, 6, 5, 4, device=device), random_tensor(3, 6, 5, 4, device=device, seed=1)
    plain, fused = statistics(device=device), statistics(device=device)
    batch_norm(input, *plain, training=True)
    batch_norm(input, *fused, training=True, residual=residual, activation="relu")
    assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))


def test_statistics_far_from_zero(device: str) -> None:
    input = random_tensor(8, 3, 50, device=device) * 1e-2 + 1e4
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    batch_norm(input, mean, var, training=True, momentum=1.0)
    torch.testing.assert_close(mean.double(), input.double().mean((0, 2)), rtol=1e-7, atol=0)
    torch.testing.assert_close(var.double(), input.double().var((0, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("scale", [1e18, 3e37])
def test_statistics_of_huge_numbers(scale: float, layout: str, device: str) -> None:
    """The mean stays finite, and the variance as long as it is one of float32's numbers."""
    input = with_layout((random_tensor(4, 6, 9, 8, device=device) + 2) * scale, layout)
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    batch_norm(input, mean, var, training=True, momentum=1.0)
    torch.testing.assert_close(mean, input.double().mean((0, 2, 3)).float(), rtol=1e-5, atol=scale * 1e-6)
    torch.testing.assert_close(var, input.double().var((0, 2, 3)).float())
    expected = torch.zeros(6), torch.ones(6)
    F.batch_norm(input.cpu(), *expected, training=True, momentum=1.0)
    assert torch.equal(var.isinf().cpu(), expected[1].isinf())


@pytest.mark.parametrize("shape", [(0, 6, 5, 4), (3, 6, 0, 4)], ids=str)
def test_empty_batches_leave_the_statistics(shape: tuple[int, ...], device: str) -> None:
    running, before = statistics(device=device), statistics(device=device)
    input = torch.empty(shape, device=device, requires_grad=True)
    output = batch_norm(input, *running, training=True, activation="silu")
    output.sum().backward()
    assert output.shape == shape
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("size", [None, 0, 3])
def test_nothing_at_all_is_torchs(training: bool, size: int | None) -> None:
    """torch takes an input of shape (0,), with any statistics, and returns it."""
    running = (None, None) if size is None else (torch.zeros(size), torch.ones(size))
    input = torch.empty(0, requires_grad=True)
    for function in (batch_norm, F.batch_norm):
        output = function(input, *running, training=training)
        assert output.shape == (0,)
        assert torch.autograd.grad(output.sum(), input)[0].shape == (0,)
    for function in (batch_norm, F.batch_norm):
        with pytest.raises((RuntimeError, IndexError)):
            function(torch.ones(3), None, None, training=True)


def test_statistics_made_in_inference_mode_are_updated_anywhere() -> None:
    """As torch's own function does; they count no changes."""
    with torch.inference_mode():
        ours, theirs = statistics(), statistics()
    input = random_tensor(3, 6, 5)
    expected = F.batch_norm(input, *theirs, training=True)
    torch.testing.assert_close(batch_norm(input, *ours, training=True), expected)
    torch.testing.assert_close(ours, theirs)


def test_evaluation_leaves_the_statistics(device: str) -> None:
    running, before = statistics(device=device), statistics(device=device)
    batch_norm(random_tensor(3, 6, 5, device=device), *running)
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


def test_updates_count_as_changes() -> None:
    """So that a graph that kept the statistics from before refuses to use them."""
    mean, var = statistics()
    input = random_tensor(3, 6, 5).requires_grad_()
    output = batch_norm(input, mean, var)
    before = mean._version
    batch_norm(input.detach(), mean, var, training=True)
    assert mean._version > before
    del output


def test_gradients_flow_while_statistics_are_updated(device: str) -> None:
    case = Case("batch_norm")
    input, weight, bias, residual, *_ = case.tensors(torch.float64, device)
    leaves = [t.requires_grad_() for t in (input, weight, bias, residual)]
    grad_output = case.grad_outputs(torch.float64, device)[0]
    output = batch_norm(
        input, *statistics(6, torch.float64, device), weight, bias, True, residual=residual, activation="gelu"
    )
    actual = torch.autograd.grad(output, leaves, grad_output)
    expected = case.but(activation="gelu").gradients([*leaves, None, None], [grad_output], reference=True)
    torch.testing.assert_close(list(actual), expected)


def test_double_backward_while_statistics_are_updated() -> None:
    mean, var = statistics(4, torch.float64)
    inputs = [t.requires_grad_() for t in Case("batch_norm", (2, 4, 3)).tensors(torch.float64)[:3]]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return batch_norm(tensors[0], mean.clone(), var.clone(), *tensors[1:], True, activation="silu")

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("shape", [(1, 6), (1, 6, 1), (1, 6, 1, 1)], ids=str)
def test_one_value_per_channel_is_torchs_error(shape: tuple[int, ...]) -> None:
    input = torch.ones(shape)
    for function in (batch_norm, F.batch_norm):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            function(input, None, None, training=True)
    assert batch_norm(input, *statistics()).shape == shape


def test_statistics_do_not_depend_on_threads() -> None:
    input = random_tensor(5, 70, 67, 61)
    results = []
    for count in (1, 2, 3):
        running = statistics(70)
        with num_threads(count):
            batch_norm(input, *running, training=True)
        results.append(running)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_evaluation_without_statistics_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match="running_mean"):
        batch_norm(torch.ones(2, 3, 4), None, None)
    with pytest.raises((RuntimeError, ValueError), match="running_var"):
        batch_norm(torch.ones(2, 3, 4), torch.zeros(3), None, training=True)


# ---- into the memory of the input ------------------------------------------------------------------------------------


def parameters(input: torch.Tensor) -> list[torch.Tensor]:
    """Mean, variance and weight of evaluation."""
    channels, device = input.shape[1], input.device
    mean, var = statistics(channels, device=str(device))
    return [mean, var, random_tensor(channels, device=str(device), seed=3)]


def overwrite(input: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    torch.ops.myvision._batch_norm_in_place(input, *parameters(input), None, residual, 1e-5, "relu", 0.01)


def expected(input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    return batch_norm(input, *parameters(input), residual=residual, activation="relu")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 5, 7, 7), (3, 8, 1, 1), (1, 17, 4, 3), (0, 4, 2, 2)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_in_place(
    shape: tuple[int, ...],
    memory_format: torch.memory_format,
    with_residual: bool,
    floating_dtype: torch.dtype,
    device: str,
) -> None:
    input = random_tensor(*shape, dtype=floating_dtype, device=device).to(memory_format=memory_format)
    residual = random_tensor(*shape, dtype=floating_dtype, device=device, seed=4) if with_residual else None
    wanted = expected(input, residual)
    overwrite(input, residual=residual)
    assert torch.equal(input, wanted)


def test_in_place_by_itself(device: str) -> None:
    """A residual that is the input."""
    input = random_tensor(2, 5, 7, 7, device=device)
    wanted = expected(input, input)
    overwrite(input, residual=input)
    assert torch.equal(input, wanted)


@pytest.mark.parametrize(
    "input",
    [
        random_tensor(2, 4, 6, 6).transpose(2, 3),
        random_tensor(2, 8, 6, 6)[:, ::2],
        random_tensor(2, 8, 3, 6, 6).to(memory_format=torch.channels_last_3d)[:, :, ::2],
        random_tensor(1, 4, 1, 6).expand(2, 4, 6, 6),
    ],
)
def test_in_place_takes_dense_inputs_only(input: torch.Tensor) -> None:
    before, text = input.clone(), "input must be contiguous or channels_last to be written to, but has shape"
    with pytest.raises(RuntimeError, match=text) as eager:
        overwrite(input)
    assert torch.equal(input, before)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (input, *parameters(input))]
        with pytest.raises(RuntimeError) as fake:
            torch.ops.myvision._batch_norm_in_place(*fakes, None, None, 1e-5, "relu", 0.01)
    assert str(fake.value) == str(eager.value)
