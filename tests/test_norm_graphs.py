"""The norms in graphs: fakes, opcheck, torch.compile, torch.export, torch.jit.trace."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, Recorder
from norm_cases import CASES, Case
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import myvision.nn

UPDATING = ["batch_norm", "instance_norm"]


def operator(op: str, overload: str = "default") -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops.myvision, op), overload)


def leaves(case: Case, device: str = "cpu", layout: str = "contiguous") -> list[Tensor | None]:
    tensors = case.tensors(torch.float32, device, layout)
    return [None if t is None else t.requires_grad_() for t in tensors[:4]] + tensors[4:]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_opcheck(case: Case, layout: str, device: str, opcheck_kinds: tuple[str, ...]) -> None:
    case = case.but(shape=(2, 6, 3, 4), activation="gelu" if case.has_activation else None)
    arguments = case.arguments(leaves(case, device, layout))
    torch.library.opcheck(operator(case.op), arguments, test_utils=opcheck_kinds)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_without_optional_tensors(case: Case) -> None:
    case = case.but(shape=(2, 6, 3, 4), affine=False, residual=False)
    torch.library.opcheck(operator(case.op), case.arguments(leaves(case)))


@pytest.mark.parametrize("op", UPDATING)
def test_opcheck_of_updates(op: str, device: str) -> None:
    input, weight, bias, residual, *_ = leaves(Case(op, (2, 6, 3, 4)), device)
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    arguments = (input, mean, var, weight, bias, residual, 0.1, 1e-5, "relu", 0.01)
    torch.library.opcheck(operator(op, "update"), arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(3, 6, 5, 4), (3, 6, 1, 1), (1, 6, 5, 1), (3, 1, 5, 4), (0, 6, 5, 4)], ids=str)
def test_fake_has_the_strides_of_the_real_one(case: Case, shape: tuple[int, ...], device: str) -> None:
    case = case.but(shape=shape, groups=1)
    if case.op == "instance_norm" and case.training and shape[2:] == (1, 1):
        pytest.skip("refused")
    for layout in LAYOUTS:
        tensors = case.tensors(torch.float32, device, layout)
        real = case.run(tensors)
        with FakeTensorMode() as mode:
            fake = case.run([None if t is None else mode.from_tensor(t) for t in tensors])
        assert [t.stride() for t in fake] == [t.stride() for t in real], layout
        assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


class Layer(nn.Module):
    """A norm between others, as a model has it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        tensors = case.tensors()
        self.weight, self.bias = (nn.Parameter(t) if t is not None else None for t in tensors[1:3])
        self.mean, self.var = (nn.Buffer(t) if t is not None else None for t in tensors[4:])

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        case = self.case.but(shape=tuple(x.shape)) if not torch.compiler.is_compiling() else self.case
        outputs = case.run([x * 2, self.weight, self.bias, residual, self.mean, self.var])
        return sum(output.sin() for output in outputs)


def inputs(case: Case, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, *case.shape[1:]), torch.randn(batch, *case.shape[1:])


def nodes(graph: Any, op: str) -> int:
    packet = getattr(torch.ops.myvision, op)
    return sum(getattr(node.target, "overloadpacket", None) is packet for node in graph.graph.nodes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_is_one_graph_for_every_batch(case: Case) -> None:
    torch._dynamo.reset()
    case = case.but(activation="silu" if case.has_activation else None)
    layer, counter = Layer(case), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 4):
        x, residual = (t.requires_grad_() for t in inputs(case, batch))
        expected, actual = layer(x, residual), compiled(x, residual)
        torch.testing.assert_close(actual, expected)
        wanted = [x, residual, *layer.parameters()]
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), wanted), torch.autograd.grad(expected.sum(), wanted)
        )
    assert counter.frame_count == 2, "one graph for the first size, one for all others"
    assert all(nodes(graph, case.op) == 1 for graph in counter.graphs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_with_dynamic_sizes_from_the_start(case: Case) -> None:
    torch._dynamo.reset()
    layer, counter = Layer(case), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    with torch.no_grad():
        for batch in (2, 7, 4):
            x, residual = inputs(case, batch)
            torch.testing.assert_close(compiled(x, residual), layer(x, residual))
            frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "no size after the first compiles anything"


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[10]], ids=str)
def test_inductor(case: Case) -> None:
    torch._dynamo.reset()
    layer = Layer(case.but(activation="gelu" if case.has_activation else None))
    x, residual = inputs(case, 3)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x, residual), layer(x, residual))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, residual).sum(), list(layer.parameters())),
        torch.autograd.grad(layer(x, residual).sum(), list(layer.parameters())),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_export_shows_the_single_operator(case: Case) -> None:
    layer, batch = Layer(case), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, inputs(case, 3), dynamic_shapes=({0: batch}, {0: batch}))
    assert nodes(program, case.op) == 1
    more = inputs(case, 5)
    torch.testing.assert_close(program.module()(*more), layer(*more))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trace_shows_the_single_operator(case: Case) -> None:
    layer, example = Layer(case), inputs(case, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        trace = torch.jit.trace(layer, example)
    kinds = [node.kind() for node in trace.inlined_graph.nodes()]
    assert kinds.count(f"myvision::{case.op}") == 1
    assert "prim::PythonOp" not in kinds
    more = inputs(case, 5)
    torch.testing.assert_close(trace(*more), layer(*more))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inference_shows_the_single_operator(case: Case) -> None:
    """No private operator, and no statistics, where nothing needs a gradient."""
    tensors = case.tensors()
    with Recorder() as recorder:
        case.run(tensors)
    assert recorder.names == [f"myvision::{case.op}"]


MODULES = {"batch_norm": myvision.nn.BatchNormAct2d, "instance_norm": myvision.nn.InstanceNormAct2d}


@pytest.mark.parametrize("op", UPDATING)
@pytest.mark.parametrize("momentum", [0.3, None])
def test_compiled_module_updates_its_statistics(op: str, momentum: float | None) -> None:
    torch._dynamo.reset()
    options = {"affine": True, "track_running_stats": True, "momentum": momentum}
    module = MODULES[op](6, **options)
    eager = copy.deepcopy(module)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for batch in (2, 3, 4):
        x = torch.randn(batch, 6, 5, 7) + 1
        compiled(x).sum().backward()
        eager(x).sum().backward()
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "no size after the first compiles anything"
    assert momentum is None or (module.running_mean > 0.1).all()
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    torch.testing.assert_close(module.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("op", UPDATING)
def test_an_exported_program_declares_the_updates(op: str) -> None:
    module = MODULES[op](6, affine=True, track_running_stats=True)
    program = torch.export.export(module, (torch.randn(2, 6, 5, 7),))
    mutated = program.run_decompositions().graph_signature.buffers_to_mutate.values()
    assert {"running_mean", "running_var"} <= set(mutated)
    x, exported = torch.randn(2, 6, 5, 7), program.module()
    torch.testing.assert_close(exported(x), module(x))
    assert exported.running_mean.any()
    torch.testing.assert_close(exported.running_mean, module.running_mean)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meta_device(case: Case) -> None:
    tensors = case.tensors(torch.float16, layout="channels_last")
    for output in case.run([None if t is None else t.to("meta") for t in tensors]):
        assert output.device.type == "meta"
        assert (output.shape, output.dtype) == (case.shape, torch.float16)
