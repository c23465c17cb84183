"""linear: derivatives of every order, torch.func, autocast, and graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, Recorder, random_tensor, run_fresh_python
from linear_cases import CASES, LAYOUTS, NAMES, PLAIN, Case
from norm_cases import ACTIVATIONS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from myvision.nn import LinearAct
from myvision.ops import linear

_ops = torch.ops.myvision

SMALL = [case.but(rows=(2, 2), features=3, outputs=4) for case in CASES]
SMOOTH = [case for case in SMALL if case.activation in (None, "silu", "gelu")]
VECTOR = Case((), 3, 2, activation="gelu")


def leaves(case: Case, device: str = "cpu") -> list[Tensor]:
    return [t.requires_grad_() for t in case.tensors(torch.float64, device) if t is not None]


def function(case: Case, plain: bool = False) -> Callable[..., Tensor]:
    """Of the tensors that there are."""

    def call(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        present = [True, True, case.bias, case.residual]
        arguments = [next(given) if is_present else None for is_present in present]
        return (case.run_formula if plain else case.run)(arguments)

    return call


def scalar(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss that has derivatives of every order."""
    return lambda *tensors: call(*tensors).pow(3).sum()


@pytest.mark.parametrize("case", [*SMOOTH, VECTOR, SMALL[0].but(rows=(0,)), SMALL[1].but(features=0)], ids=str)
def test_gradcheck(case: Case, device: str, fast_mode: bool) -> None:
    assert gradcheck(
        function(case),
        leaves(case, device),
        fast_mode=fast_mode,
        check_forward_ad=True,
        check_batched_grad=True,
        check_undefined_grad=True,
    )


@pytest.mark.parametrize("case", [*SMOOTH, VECTOR], ids=str)
def test_gradgradcheck(case: Case, device: str) -> None:
    assert gradgradcheck(
        function(case), leaves(case, device), check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_every_activation(activation: str) -> None:
    case = SMALL[0].but(activation=activation)
    assert gradcheck(function(case), leaves(case), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function(case), leaves(case), fast_mode=True)


@pytest.mark.parametrize("moving", NAMES)
def test_forward_mode(moving: str) -> None:
    case = SMALL[0].but(activation="gelu", dropout_p=0.3)
    tensors = [t.detach() for t in leaves(case)]
    i = NAMES.index(moving)
    with forward_ad.dual_level():
        tensors[i] = forward_ad.make_dual(tensors[i], random_tensor(*tensors[i].shape, dtype=torch.float64, seed=7))
        actual, expected = (forward_ad.unpack_dual(function(case, plain)(*tensors)).tangent for plain in (False, True))
    assert actual.any()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("outer", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("inner", [torch.func.jacrev, torch.func.jacfwd])
def test_hessians(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    case = SMALL[0].but(activation="silu")
    tensors = [t.detach() for t in leaves(case)]
    expected = torch.func.hessian(scalar(function(case, plain=True)))(*tensors)
    torch.testing.assert_close(outer(inner(scalar(function(case))))(*tensors), expected)


@pytest.mark.parametrize("in_dims", [(0, None, None, None), (None, 0, 0, None), (2, 1, None, 0), (0,) * 4], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_vmap_and_gradients_of_each_sample(in_dims: tuple[int | None, ...], activation: str | None) -> None:
    """A batch of inputs, of weights, or of both."""
    case = SMALL[0].but(activation=activation)
    tensors = [t.detach() for t in leaves(case)]
    batched = [
        tensor if dim is None else torch.stack([tensor, tensor * 0.5, -tensor], dim)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    ours, plain = function(case), function(case, plain=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrap in (lambda call: call, lambda call: torch.func.grad(scalar(call), (0, 1, 2, 3))):
            actual, expected = (torch.vmap(wrap(call), in_dims)(*batched) for call in (ours, plain))
            torch.testing.assert_close(actual, expected)


def test_vmap_is_one_call_where_all_share_the_parameters() -> None:
    weight = random_tensor(6, 5)
    loss = torch.func.grad(lambda x: linear(x, weight, activation="silu").sum())
    with Recorder() as recorder:
        for inputs in (random_tensor(3, 5), random_tensor(3, 4, 5)):
            torch.vmap(loss)(inputs)
    ours = [name for name in recorder.names if name.startswith("myvision")]
    assert ours == ["myvision::_linear_forward", "myvision::_linear_backward"] * 2


def test_vmap_twice() -> None:
    """An ensemble of layers, each over a batch of its own."""
    inputs, weights = random_tensor(3, 4, 5), random_tensor(3, 6, 5)
    over_inputs = torch.vmap(linear, (0, None))
    torch.testing.assert_close(torch.vmap(over_inputs)(inputs, weights), torch.einsum("ebi,eoi->ebo", inputs, weights))


def test_vmap_over_dropout() -> None:
    """As of torch's dropout, samples that are to have masks of their own must say so."""

    def masks(**options: str) -> Tensor:
        return torch.vmap(lambda x: linear(x, torch.ones(8, 2), dropout_p=0.5) != 0, **options)(torch.ones(4, 64, 2))

    different, same = masks(randomness="different"), masks(randomness="same")
    assert not torch.equal(different[0], different[1])
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="random"):
        masks()


@pytest.mark.exhaustive  # the registration is that of the other operators
def test_derivatives_without_private_names() -> None:
    """Where torch lacks a name that the lean registration needs, the public one gives the same derivatives."""
    run_fresh_python(
        """
import torch, torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function  # a private name that a later torch may not have
import myvision._dispatch.autograd
assert not myvision._dispatch.autograd._LEAN
from torch.autograd import gradcheck, gradgradcheck
from test_linear_graphs import SMOOTH, function, leaves
for case in SMOOTH:
    assert gradcheck(function(case), leaves(case), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function(case), leaves(case), fast_mode=True)
"""
    )


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.float16])
def test_autocast(dtype: torch.dtype, given: torch.dtype, parameters: torch.dtype, device: str) -> None:
    """All take autocast's dtype, as in torch, and gradients the dtype of what they are of."""
    input, weight, bias, residual = PLAIN.tensors(device=device)
    dtypes = given, parameters, parameters, torch.float32
    tensors = [t.to(own).requires_grad_() for t, own in zip((input, weight, bias, residual), dtypes, strict=True)]
    with torch.autocast(device, dtype):
        output = PLAIN.run(tensors)
        assert F.linear(*tensors[:3]).dtype == output.dtype == dtype
    torch.testing.assert_close(output, PLAIN.run([t.to(dtype) for t in tensors]), rtol=0, atol=0)
    for gradient, tensor in zip(torch.autograd.grad(output.sum(), tensors), tensors, strict=True):
        assert gradient.dtype == tensor.dtype


def test_autocast_leaves_doubles_alone(real_device: str) -> None:
    tensors = PLAIN.tensors(torch.float64, real_device)
    with torch.autocast(real_device, torch.bfloat16):
        output = PLAIN.run(tensors)
    torch.testing.assert_close(output, PLAIN.run(tensors), rtol=0, atol=0)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_backward_under_autocast_keeps_the_types_of_forward(activation: str | None, device: str) -> None:
    case = PLAIN.but(activation=activation)
    tensors = [t.requires_grad_() for t in case.tensors(device=device)]
    output, grad_output = case.run(tensors), case.grad_output(device=device)
    expected = torch.autograd.grad(output, tensors, grad_output, retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        actual = torch.autograd.grad(output, tensors, grad_output)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_meta_device() -> None:
    output = PLAIN.run([t.to("meta") for t in PLAIN.tensors(torch.float16)])
    assert (output.device.type, output.shape, output.dtype) == ("meta", PLAIN.output_shape, torch.float16)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in SMALL if case.activation in (None, "gelu")], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_opcheck(case: Case, layout: str, device: str, opcheck_kinds: tuple[str, ...]) -> None:
    tensors = [t if t is None else t.requires_grad_() for t in case.tensors(torch.float32, device, layout)]
    torch.library.opcheck(_ops.linear.default, case.arguments(tensors), test_utils=opcheck_kinds)


@pytest.mark.parametrize(
    "case", [PLAIN, PLAIN.but(activation="silu"), PLAIN.but(rows=()), PLAIN.but(rows=(0, 1))], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_are_like_the_real_ones(case: Case, layout: str, device: str) -> None:
    tensors = [*case.tensors(torch.float32, device, layout), case.grad_output(torch.float32, device, layout)]

    def results(tensors: list[Tensor]) -> list[Tensor]:
        *tensors, grad_output = tensors
        activation, slope, p, seed = case.arguments(tensors)[3:7]
        output, preactivation = _ops._linear_forward(*case.arguments(tensors))
        options = activation, slope, p, seed, [True, True, True]
        return [output, preactivation, *_ops._linear_backward(grad_output, *tensors[:3], preactivation, *options)]

    real = results(tensors)
    with FakeTensorMode() as mode:
        fake = results([mode.from_tensor(t) for t in tensors])
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


class Layer(nn.Module):
    """linear between others, as a model has it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.weight, self.bias = (None if t is None else nn.Parameter(t) for t in case.tensors()[1:3])

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.case.run([x * 2, self.weight, self.bias, residual]).sin()


def inputs(case: Case, batch: int) -> tuple[Tensor, Tensor | None]:
    case = case.but(rows=(batch, batch + 1))
    return case.tensors()[0], case.tensors()[3]


def count(graph: Any) -> int:
    return sum(getattr(node.target, "overloadpacket", None) is _ops.linear for node in graph.graph.nodes)


IN_GRAPHS = [PLAIN, Case(activation="gelu"), Case(bias=False, residual=False, activation="relu")]


@pytest.mark.parametrize("case", IN_GRAPHS, ids=str)
def test_compile_is_one_graph_for_every_size(case: Case) -> None:
    torch._dynamo.reset()
    layer, counter = Layer(case), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for batch in (2, 5, 4):
        x, residual = (t if t is None else t.requires_grad_() for t in inputs(case, batch))
        expected, actual = layer(x, residual), compiled(x, residual)
        torch.testing.assert_close(actual, expected)
        wanted = [x, *([] if residual is None else [residual]), *layer.parameters()]
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), wanted), torch.autograd.grad(expected.sum(), wanted)
        )
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "no size after the first compiles anything"
    graphs = [graph for graph in counter.graphs if len(graph.graph.nodes)]  # without an attempt that dynamo gave up
    assert [count(graph) for graph in graphs] == [1]


@pytest.mark.exhaustive  # it sees what aot_eager does
def test_inductor() -> None:
    torch._dynamo.reset()
    layer = Layer(PLAIN.but(activation="gelu"))
    x, residual = inputs(PLAIN, 3)
    compiled, wanted = torch.compile(layer, fullgraph=True), list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, residual).sum(), wanted), torch.autograd.grad(layer(x, residual).sum(), wanted)
    )


def test_dropout_in_a_compiled_graph() -> None:
    torch._dynamo.reset()

    def call(input: Tensor, weight: Tensor) -> Tensor:
        return linear(input, weight, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    input, weight = torch.ones(40, 3), torch.ones(50, 3, requires_grad=True)
    outputs = [compiled(input, weight) for _ in range(2)]
    assert not torch.equal(*outputs), "a graph draws a new seed in every run"
    for output in outputs:
        kept = output != 0
        assert 0.3 < kept.double().mean() < 0.7
        (gradient,) = torch.autograd.grad(output.sum(), weight)
        torch.testing.assert_close(gradient, 2.0 * kept.sum(0)[:, None].expand(50, 3))


@pytest.mark.parametrize("case", IN_GRAPHS, ids=str)
def test_export_shows_the_single_operator(case: Case) -> None:
    layer, free = Layer(case), torch.export.Dim.DYNAMIC
    sizes = {0: free, 1: free}
    program = torch.export.export(
        layer, inputs(case, 3), dynamic_shapes=(sizes, sizes if case.residual else None), strict=False
    )
    assert count(program) == 1
    more = inputs(case, 5)
    torch.testing.assert_close(program.module()(*more), layer(*more))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("case", [case for case in IN_GRAPHS if case.residual], ids=str)
def test_trace_shows_the_single_operator(case: Case) -> None:
    layer = Layer(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        trace = torch.jit.trace(layer, inputs(case, 3))
    kinds = [node.kind() for node in trace.inlined_graph.nodes()]
    assert kinds.count("myvision::linear") == 1
    assert "prim::PythonOp" not in kinds
    more = inputs(case, 5)
    torch.testing.assert_close(trace(*more), layer(*more))


@pytest.mark.parametrize("case", [PLAIN, PLAIN.but(activation="silu")], ids=str)
def test_inference_shows_the_single_operator(case: Case) -> None:
    """No private operator, and no preactivation, where nothing needs a gradient."""
    tensors = case.tensors()
    with Recorder() as recorder:
        case.run(tensors)
    assert recorder.names == ["myvision::linear"]


def test_a_module_in_graphs() -> None:
    """In training dropout draws in every run of the graph; in evaluation the graph has none."""
    torch._dynamo.reset()
    module, x = LinearAct(5, 40, activation="gelu", dropout_p=0.5), random_tensor(30, 5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))
    module.eval()
    torch.testing.assert_close(compiled(x), module(x))
    program = torch.export.export(module, (x,))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == [
        "myvision.linear.default"
    ]
