"""What only a GPU shows: streams, CUDA graphs, its own primitives, tensors of more than 2^31 elements."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import emulation
import pytest
import torch
from deform_conv2d_cases import Case
from emulation import Emulator
from helpers import REPOSITORY, random_tensor
from torch import Tensor

import myvision
from myvision.ops import (
    add_layer_norm,
    add_rms_norm,
    batch_norm,
    deform_conv2d,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    my_add,
    rms_norm,
    scaled_dot_product_attention,
    varlen_attention,
)

ROW = 2**15
PAST_32_BITS = 2**31 + 64 * ROW  # elements, a whole number of rows and of halves of them
BUSY_CYCLES = 200_000_000  # about a tenth of a second


@dataclass(frozen=True)
class Call:
    """How to make an operator's inputs, of a type and on a device, and how to call it."""

    inputs: Callable[[torch.dtype, str], list[Tensor]]
    run: Callable[[list[Tensor]], Tensor]

    def results(self, inputs: list[Tensor]) -> list[Tensor]:
        """The output and the gradients of all inputs."""
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = self.run(leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def addends(dtype: torch.dtype, device: str) -> list[Tensor]:
    return [random_tensor(300, 70, dtype=dtype, device=device, seed=seed) for seed in (0, 1)]


def broadcast_addends(dtype: torch.dtype, device: str) -> list[Tensor]:
    x, y = addends(dtype, device)
    return [x.t(), y[0, :, None]]


def tensors(*shapes: tuple[int, ...]) -> Callable[[torch.dtype, str], list[Tensor]]:
    return lambda dtype, device: [
        random_tensor(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes)
    ]


def normalise_images(inputs: list[Tensor]) -> Tensor:
    x, weight, bias, residual = inputs
    return batch_norm(x, None, None, weight, bias, training=True, residual=residual, activation="relu")


def normalise_by_running_statistics(inputs: list[Tensor]) -> Tensor:
    x, weight, bias, residual = inputs
    running = torch.full_like(bias, 0.5), torch.full_like(bias, 2)
    return batch_norm(x, *running, weight, bias, residual=residual, activation="silu")


def add_and_normalise(inputs: list[Tensor]) -> Tensor:
    x, weight, bias, residual = inputs
    output, total = add_layer_norm(x, residual, 96, weight, bias)
    return output + total


def drop_add_and_normalise(inputs: list[Tensor]) -> Tensor:
    x, weight, bias, residual = inputs
    seed = torch.full((), 7, device=x.device)  # the same in every call
    output, total = torch.ops.myvision.add_layer_norm.default(x, residual, [96], weight, bias, 1e-5, 0.3, seed)
    return output + total


def drop_after_linear(inputs: list[Tensor]) -> Tensor:
    seed = torch.full((), 7, device=inputs[0].device)  # the same in every call
    x, weight, bias, residual = inputs
    return torch.ops.myvision.linear.default(x, weight, bias, "gelu", 0.0, 0.3, seed, residual)


def attend_with_a_mask(inputs: list[Tensor]) -> Tensor:
    query, key, value, mask = inputs
    return scaled_dot_product_attention(query, key, value, mask, is_causal=True, softcap=5.0, window=(40, None))


def attend_with_dropout(inputs: list[Tensor]) -> Tensor:
    seed = torch.full((), 7, device=inputs[0].device)  # the same in every call
    options = 0.3, True, "bottom_right", None, None, None, 0.0
    return torch.ops.myvision.attention.default(*inputs, None, None, None, None, seed, *options)


def attend_on_tensor_cores(inputs: list[Tensor]) -> Tensor:
    return scaled_dot_product_attention(*[tensor.bfloat16() for tensor in inputs], is_causal=True)


def attend_to_packed_sequences(inputs: list[Tensor]) -> Tensor:
    """With offsets that leave rows at the end to no sequence."""
    starts = torch.arange(0, 120, 39, device=inputs[0].device)
    return varlen_attention(*inputs, starts, starts, is_causal=True)


CONVOLUTION = Case(batch=3, in_channels=16, out_channels=24, image=(20, 21), groups=2, offset_groups=2)
IMAGES = tensors((3, 16, 9, 12), (16,), (16,), (3, 16, 9, 12))
ROWS = tensors((7, 5, 96), (96,), (96,), (7, 5, 96))
TOKENS = tensors((7, 5, 96), (130, 96), (130,), (7, 5, 130))
LONG_ROWS = tensors((3, 30000), (30000,), (30000,))
HEADS = tensors((2, 4, 90, 40), (2, 2, 100, 40), (2, 2, 100, 24))
CALLS = {  # by operator, and what is special
    "add_layer_norm": Call(ROWS, add_and_normalise),
    "add_layer_norm, dropout": Call(ROWS, drop_add_and_normalise),
    "add_rms_norm": Call(ROWS, lambda inputs: add_rms_norm(inputs[0], inputs[3], 96, inputs[1])[0] + inputs[2]),
    "batch_norm": Call(IMAGES, normalise_images),
    "batch_norm, channels_last": Call(
        IMAGES, lambda inputs: normalise_images([inputs[0].contiguous(memory_format=torch.channels_last), *inputs[1:]])
    ),
    "batch_norm, running statistics": Call(IMAGES, normalise_by_running_statistics),
    "deform_conv2d": Call(CONVOLUTION.tensors, CONVOLUTION.run),
    "group_norm": Call(
        IMAGES, lambda inputs: group_norm(inputs[0], 4, *inputs[1:3], residual=inputs[3], activation="gelu")
    ),
    "instance_norm": Call(
        IMAGES, lambda inputs: instance_norm(inputs[0], None, None, *inputs[1:3], residual=inputs[3])
    ),
    "layer_norm": Call(
        ROWS, lambda inputs: layer_norm(inputs[0], 96, *inputs[1:3], residual=inputs[3], activation="gelu_tanh")
    ),
    "layer_norm, channels first": Call(
        IMAGES, lambda inputs: layer_norm(inputs[0], 16, *inputs[1:3], residual=inputs[3], channels="first")
    ),
    "layer_norm, long rows": Call(LONG_ROWS, lambda inputs: layer_norm(inputs[0], 30000, *inputs[1:])),
    "linear": Call(TOKENS, lambda inputs: linear(*inputs[:3], activation="silu", residual=inputs[3])),
    "linear, dropout": Call(TOKENS, drop_after_linear),
    "linear, no epilogue": Call(TOKENS, lambda inputs: linear(*inputs[:3]) + inputs[3]),
    "my_add": Call(addends, lambda inputs: my_add(*inputs)),
    "my_add, broadcast": Call(broadcast_addends, lambda inputs: my_add(*inputs)),
    "rms_norm": Call(
        ROWS, lambda inputs: rms_norm(inputs[0], 96, inputs[1], residual=inputs[3], activation="hardswish") + inputs[2]
    ),
    "scaled_dot_product_attention": Call(
        HEADS, lambda inputs: scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    ),
    "scaled_dot_product_attention, mask": Call(
        tensors((2, 4, 90, 40), (2, 4, 100, 40), (2, 4, 100, 24), (4, 1, 100)), attend_with_a_mask
    ),
    "scaled_dot_product_attention, dropout": Call(HEADS, attend_with_dropout),
    "scaled_dot_product_attention, tensor cores": Call(
        tensors((2, 4, 90, 80), (2, 4, 100, 80), (2, 4, 100, 136)), attend_on_tensor_cores
    ),
    "scaled_dot_product_attention, decoding": Call(
        tensors((1, 4, 1, 64), (1, 4, 2000, 64), (1, 4, 2000, 64)),
        lambda inputs: scaled_dot_product_attention(*inputs),
    ),
    "varlen_attention": Call(tensors((120, 4, 40), (120, 4, 40), (120, 4, 40)), attend_to_packed_sequences),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.fixture(params=[False, True], ids=["any_order", "deterministic"])
def _deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


def test_every_operator_is_called() -> None:
    assert {name.partition(",")[0] for name in CALLS} == set(myvision.ops.__all__)


# ---- streams and graphs ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_deterministic")
def test_runs_on_the_current_stream(call: Call, gpu: str) -> None:
    """The inputs are written late on a stream of their own: work on any other stream would read the old ones."""
    inputs = call.inputs(torch.float32, gpu)
    halves = [tensor / 2 for tensor in inputs]
    expected = call.results(halves)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(BUSY_CYCLES)
        for tensor, half in zip(inputs, halves, strict=True):
            tensor.copy_(half)
        actual = call.results(inputs)
    torch.cuda.synchronize()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_deterministic")
def test_a_captured_graph_replays_with_new_inputs(call: Call, gpu: str) -> None:
    inputs = call.inputs(torch.float32, gpu)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is loaded or allocated once must not be captured
        call.results(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.results(inputs)
    for _ in range(2):
        for tensor in inputs:
            tensor.mul_(0.75)
        graph.replay()
        torch.testing.assert_close(captured, call.results(inputs), rtol=1e-4, atol=1e-4)


# ---- the emulator's word ---------------------------------------------------------------------------------------------


def lines_of(program: Path) -> list[str]:
    return subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(not emulation.is_supported(), reason="the GPU emulator runs on Linux and x86-64")
def test_primitives_have_the_bits_that_the_emulator_gives_them(gpu: str, tmp_path: Path) -> None:
    source, program = emulation.SIMT / "primitives.cu", tmp_path / "primitives"
    nvcc = emulation.setup_script.find_cuda_home(torch.version.cuda) / "bin" / "nvcc"
    subprocess.run([nvcc, "-std=c++20", "-arch=native", "-Icsrc", source, "-o", program], cwd=REPOSITORY, check=True)
    assert lines_of(program) == lines_of(Emulator().program("primitives"))


# ---- past 2^31 elements ----------------------------------------------------------------------------------------------


def need_memory(gpu: str, gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(gpu)
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, there are {free >> 30}")


def random_bytes(*shape: int, device: str) -> Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8, device=device)


def assert_is_twice_plus(output: Tensor, x: Tensor, y: Tensor) -> None:
    """Piece by piece, so that the expected values take little memory."""
    for part in zip(*(tensor.split(max(1, len(output) // 16)) for tensor in (output, x, y)), strict=True):
        assert torch.equal(part[0], 2 * part[1] + part[2])


@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "unaligned"])
def test_my_add_of_a_long_line(first: int, gpu: str) -> None:
    need_memory(gpu, 10)
    x = random_bytes(PAST_32_BITS, device=gpu)[first:]
    y = x.flip(0)
    assert_is_twice_plus(my_add(x, y), x, y)


def test_my_add_of_many_rows(gpu: str) -> None:
    """Broadcast along rows, so that the dimensions do not merge to a long line."""
    need_memory(gpu, 10)
    x = random_bytes(PAST_32_BITS // ROW, ROW, device=gpu).t()
    y = random_bytes(ROW, 1, device=gpu)
    assert_is_twice_plus(my_add(x, y), x, y)


def test_my_add_of_few_elements_far_apart(gpu: str) -> None:
    need_memory(gpu, 3)
    x = torch.zeros(PAST_32_BITS, dtype=torch.int8, device=gpu)[::ROW]
    x += random_bytes(len(x), device=gpu)
    assert torch.equal(my_add(x, x), 3 * x)


@pytest.mark.parametrize("images", [1, 2], ids=["one plane", "two images"])
def test_deform_conv2d_of_a_large_input(images: int, gpu: str) -> None:
    """Every 64th pixel, without offsets: the output is twice what was sampled, and so is the gradient."""
    need_memory(gpu, 32)
    step = 64
    shape = (images, 1, PAST_32_BITS // ROW // images, ROW)
    input = torch.randn(shape, dtype=torch.float16, device=gpu).requires_grad_()
    weight = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float16, device=gpu)
    sampled = input.detach()[:, :, ::step, ::step]
    offset = torch.zeros(images, 2, *sampled.shape[2:], dtype=torch.float16, device=gpu)
    output = deform_conv2d(input, offset, weight, stride=step)
    assert torch.equal(output, 2 * sampled)
    grad_output = torch.rand_like(output) + 1
    (gradient,) = torch.autograd.grad(output, input, grad_output)
    assert torch.equal(gradient[:, :, ::step, ::step], 2 * grad_output)
    assert sum(int(rows.count_nonzero()) for rows in gradient.split(1024, dim=2)) == grad_output.numel()


def test_deform_conv2d_of_a_large_output(gpu: str) -> None:
    """One input channel and 1 x 1 kernels: each output channel is a multiple of the input."""
    need_memory(gpu, 16)
    channels, width = 128, 4096
    input = torch.randn(1, 1, PAST_32_BITS // channels // width, width, dtype=torch.float16, device=gpu)
    weight = torch.arange(channels, dtype=torch.float16, device=gpu).view(-1, 1, 1, 1).requires_grad_()
    offset = torch.zeros(1, 2, *input.shape[2:], dtype=torch.float16, device=gpu)
    output = deform_conv2d(input, offset, weight)
    for channel, plane in enumerate(output.detach()[0]):
        assert torch.equal(plane, input[0, 0] * channel)
    grad_output = torch.zeros_like(output)
    grad_output[:, :, -1] = 1
    (gradient,) = torch.autograd.grad(output, weight, grad_output)
    expected = input[0, 0, -1].float().sum().half().expand_as(gradient)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


def test_layer_norm_of_many_rows(gpu: str) -> None:
    need_memory(gpu, 24)
    x = torch.randn(PAST_32_BITS // ROW, ROW, dtype=torch.float16, device=gpu).requires_grad_()
    grad_output = torch.randn_like(x)
    output = layer_norm(x, ROW)
    (gradient,) = torch.autograd.grad(output, x, grad_output)
    for rows in torch.arange(len(x)).split(len(x) // 16):
        part = x.detach()[rows].float().requires_grad_()
        expected = torch.nn.functional.layer_norm(part, (ROW,))
        torch.testing.assert_close(output[rows].float(), expected, rtol=2e-3, atol=2e-3)
        (expected,) = torch.autograd.grad(expected, part, grad_output[rows].float())
        torch.testing.assert_close(gradient[rows].float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("outputs", [ROW, ROW + 1], ids=["aligned", "unaligned"])
def test_linear_of_a_large_output(outputs: int, gpu: str) -> None:
    """Of one feature: each column is a multiple of the input."""
    need_memory(gpu, 32)
    input = torch.randn(PAST_32_BITS // ROW, 1, dtype=torch.float16, device=gpu).requires_grad_()
    weight = (torch.arange(outputs, device=gpu) % 3 + 1).half()[:, None]
    residual = torch.ones(1, 1, dtype=torch.float16, device=gpu).expand(len(input), outputs)
    output = linear(input, weight, activation="relu", residual=residual)
    for column in (0, 1, outputs - 1):
        torch.testing.assert_close(output[:, column], input[:, 0].relu() * weight[column] + 1)
    grad_output = torch.zeros_like(output)
    grad_output[:, -1] = 1
    (gradient,) = torch.autograd.grad(output, input, grad_output)
    assert torch.equal(gradient[:, 0], (input[:, 0] > 0) * weight[-1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_of_a_large_input(memory_format: torch.memory_format, gpu: str) -> None:
    """Rows of 1 and of 3 in turn: the mean is 2 and the variance 1."""
    need_memory(gpu, 24)
    shape = (2, 8, PAST_32_BITS // ROW, ROW // 16)
    x = torch.ones(shape, dtype=torch.float16, device=gpu).to(memory_format=memory_format)
    x[:, :, 1::2] = 3
    output = batch_norm(x.requires_grad_(), None, None, training=True)
    assert all(torch.equal(rows, part - 2) for rows, part in zip(output.split(1024, 2), x.split(1024, 2), strict=True))
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert gradient.abs().max() < 1e-3


def test_attention_of_many_sequences(gpu: str) -> None:
    need_memory(gpu, 48)
    shape = (PAST_32_BITS // 4096, 1, 64, 64)
    leaves = [torch.randn(shape, dtype=torch.float16, device=gpu).requires_grad_() for _ in range(3)]
    output = scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(output, leaves, leaves[0].detach())
    last = [leaf.detach()[-2:].float().requires_grad_() for leaf in leaves]
    expected = torch.nn.functional.scaled_dot_product_attention(*last, is_causal=True)
    torch.testing.assert_close(output[-2:].float(), expected, rtol=1e-2, atol=1e-2)
    for gradient, part in zip(gradients, torch.autograd.grad(expected, last, last[0].detach()), strict=True):
        torch.testing.assert_close(gradient[-2:].float(), part, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_with_a_large_mask(dtype: torch.dtype, gpu: str) -> None:
    """The last queries see the last keys alone."""
    need_memory(gpu, 8)
    length = 46400
    query, key, value = (torch.randn(1, 1, length, 8, dtype=dtype, device=gpu) for _ in range(3))
    mask = torch.ones(length, length, dtype=torch.bool, device=gpu)
    mask[-5:, :-3] = False
    output = scaled_dot_product_attention(query, key, value, mask)[:, :, -5:]
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, :, -5:], key[:, :, -3:], value[:, :, -3:])
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
