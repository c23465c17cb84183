"""deform_conv2d in graphs: fakes, opcheck, torch.compile, torch.jit.trace."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from deform_conv2d_cases import CASES, Case
from helpers import with_layout
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from myvision.nn import DeformConv2d, DeformConv2dPack

FORWARD = torch.ops.myvision.deform_conv2d.default
BACKWARD = torch.ops.myvision._deform_conv2d_backward.default


@pytest.mark.parametrize("case", [Case(), Case(mask=False, bias=False), CASES[4], Case(batch=0)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_opcheck(case: Case, layout: str, device: str, opcheck_kinds: tuple[str, ...]) -> None:
    tensors = [None if t is None else t.requires_grad_() for t in case.tensors(torch.float32, device, layout)]
    torch.library.opcheck(FORWARD, (*tensors, *case.geometry), test_utils=opcheck_kinds)


def test_opcheck_beside_float_offsets(device: str) -> None:
    case = Case(float_offset=True)
    tensors = [t.requires_grad_() for t in case.tensors(torch.bfloat16, device)]
    torch.library.opcheck(FORWARD, (*tensors, *case.geometry))
    backward = case.grad_output(torch.bfloat16, device), *tensors[:4], *case.geometry, [True] * 5, False
    torch.library.opcheck(BACKWARD, backward, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("output_mask", [[True] * 5, [True, False, True, False, False]])
def test_opcheck_of_backward(output_mask: list[bool], device: str, opcheck_kinds: tuple[str, ...]) -> None:
    case = Case()
    input, weight, offset, mask, _ = (t.requires_grad_() for t in case.tensors(torch.float64, device))
    arguments = case.grad_output(torch.float64, device), input, weight, offset, mask, *case.geometry, output_mask, False
    torch.library.opcheck(BACKWARD, arguments, test_utils=opcheck_kinds)


@pytest.mark.parametrize("input_layout", ["contiguous", "channels_last", "sliced", "permuted", "offset"])
@pytest.mark.parametrize("weight_layout", ["contiguous", "channels_last", "permuted"])
@pytest.mark.parametrize("channels", [1, 4])
def test_fake_has_the_strides_of_the_real_one(input_layout: str, weight_layout: str, channels: int) -> None:
    case = Case(in_channels=channels)
    input, weight, offset, mask, bias = case.tensors()
    tensors = [with_layout(input, input_layout), with_layout(weight, weight_layout), offset, mask, bias]
    gradient = case.grad_output()
    backward = (*case.geometry, [True] * 5, False)
    real = [case.run(tensors), *BACKWARD(gradient, *tensors[:4], *backward)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        fake = [case.run(fakes), *BACKWARD(mode.from_tensor(gradient), *fakes[:4], *backward)]
    assert [t.stride() for t in fake] == [t.stride() for t in real]
    assert [t.shape for t in fake] == [t.shape for t in real]


class Layer(torch.nn.Module):
    """Everything an exporter meets: parameters, and offsets and a mask that are computed."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = DeformConv2dPack(4, 6, 3, **options)
        torch.nn.init.normal_(self.layer.conv_offset.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def test_compile_is_one_graph_for_every_size() -> None:
    torch._dynamo.reset()
    layer, counter = Layer(padding=1), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for batch, height, width in ((2, 7, 9), (3, 8, 11), (5, 12, 6), (4, 9, 17)):
        x = torch.rand(batch, 4, height, width, requires_grad=True)
        expected, actual = layer(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), [x, *layer.parameters()]),
            torch.autograd.grad(expected.sum(), [x, *layer.parameters()]),
        )
    assert counter.frame_count == 2, "one graph for the first size, one for all others"
    assert all(sum(node.target is FORWARD for node in graph.graph.nodes) == 1 for graph in counter.graphs)


def test_compile_with_dynamic_sizes_from_the_start() -> None:
    torch._dynamo.reset()
    layer, counter = Layer(padding="same"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch, height, width in ((2, 7, 9), (3, 8, 11), (5, 12, 6)):
            x = torch.rand(batch, 4, height, width)
            torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [{"offset_groups": 2}, {"modulated": False, "bias": False}])
def test_inductor(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = Layer(padding=1, **options).to(memory_format=torch.channels_last)
    x = torch.rand(2, 4, 8, 8).to(memory_format=torch.channels_last)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), list(layer.parameters())),
        torch.autograd.grad(layer(x).sum(), list(layer.parameters())),
    )


def traced(module: Any, *inputs: Tensor) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        return torch.jit.trace(module, inputs)


def kinds(trace: torch.jit.ScriptModule) -> list[str]:
    return [node.kind() for node in trace.inlined_graph.nodes() if not node.kind().startswith("prim::")]


def test_trace_of_a_layer_is_one_node() -> None:
    input, _, offset, mask, _ = Case().tensors()
    layer = DeformConv2d(4, 6, 3, padding=1)
    assert layer.weight.requires_grad
    trace = traced(layer, input, offset, mask)
    assert kinds(trace) == ["myvision::deform_conv2d"]
    torch.testing.assert_close(trace(input, offset, mask), layer(input, offset, mask))


def test_trace_of_a_module_follows_the_size() -> None:
    layer = Layer(padding=1)
    trace = traced(layer, torch.rand(2, 4, 7, 9))
    assert kinds(trace).count("myvision::deform_conv2d") == 1
    assert "aten::size" not in kinds(trace)
    x = torch.rand(3, 4, 11, 6)
    torch.testing.assert_close(trace(x), layer(x))
