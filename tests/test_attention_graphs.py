"""Attention: derivatives of every order, torch.func, autocast, and graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_cases import NAMES, PLAIN, Case
from helpers import HALF_DTYPES, Recorder, random_tensor, run_fresh_python
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from myvision.ops import scaled_dot_product_attention, varlen_attention

_ops = torch.ops.myvision

SMALL = PLAIN.but(batch=1, heads=2, key_heads=2, queries=3, keys=4, width=3, value_width=2)
CASES = [
    SMALL,
    SMALL.but(is_causal=True, causal_alignment="bottom_right"),
    SMALL.but(key_heads=1, window=(2, 1)),
    SMALL.but(mask="additive"),
    SMALL.but(mask="additive", mask_shape="k"),
    SMALL.but(mask="bool", mask_shape="bk"),
    SMALL.but(softcap=0.8, alibi="heads"),
    SMALL.but(dropout_p=0.4),
    SMALL.but(lengths=((3, 2), (1, 4), (0, 2)), key_heads=1),
    SMALL.but(lengths=((3, 2), (1, 4)), is_causal=True, dropout_p=0.3),
]


def leaves(case: Case, device: str = "cpu") -> list[Tensor]:
    """What has gradients, in float64."""
    return [
        tensor.requires_grad_()
        for tensor in case.tensors(torch.float64, device)[:4]
        if tensor is not None and tensor.dtype == torch.float64
    ]


def function(case: Case, device: str = "cpu", plain: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Output and lse of the tensors that have gradients; rows that see no key have no lse that could be derived."""
    fixed = case.tensors(torch.float64, device)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        arguments = [*tensors, *fixed[len(tensors) :]]
        output, lse = (case.run_reference if plain else case.run)(arguments)
        return output, torch.where(lse > -torch.inf, lse, 0)

    return call


def finite(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Without a mask's -inf, of which numerical derivatives know nothing."""
    return [torch.where(t > -torch.inf, t, -0.3).detach().requires_grad_() for t in tensors]


def scalar(call: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """A loss that has derivatives of every order."""

    def loss(*tensors: Tensor) -> Tensor:
        output, lse = call(*tensors)
        return output.pow(3).sum() + lse.sin().sum()

    return loss


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case: Case, device: str, fast_mode: bool) -> None:
    assert gradcheck(
        function(case, device),
        finite(leaves(case, device)),
        fast_mode=fast_mode,
        check_forward_ad=True,
        check_batched_grad=True,
        check_undefined_grad=True,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradgradcheck(case: Case, device: str) -> None:
    assert gradgradcheck(
        function(case, device),
        finite(leaves(case, device)),
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        fast_mode=True,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_without_lse(case: Case, real_device: str) -> None:
    """As most calls have it, it has derivatives of its own."""
    tensors, fixed = finite(leaves(case, real_device)), case.tensors(torch.float64, real_device)

    def call(*values: Tensor) -> Tensor:
        return _ops.attention(*values, *fixed[len(values) :], *case.options())

    assert gradcheck(call, tensors, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, tensors, fast_mode=True)
    assert torch.equal(call(*tensors), function(case, real_device)(*tensors)[0])


@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("output", [0, 1])
def test_one_gradient_of_one_output(wanted: str, output: int, device: str) -> None:
    case = PLAIN.but(mask="additive", mask_shape="hk", softcap=2.0)
    gradients, computed = [], []
    for plain in (False, True):
        tensors = case.tensors(torch.float64, device)
        tensors[NAMES.index(wanted)].requires_grad_()
        results = (case.run_reference if plain else case.run)(tensors)
        loss = torch.where(results[1] > -torch.inf, results[1], 0).sin().sum() if output else results[0].pow(2).sum()
        if not plain:
            computed = results[0].grad_fn.apply(torch.ones_like(results[0]), None)
        tensor = tensors[NAMES.index(wanted)]
        gradients.append(torch.autograd.grad(loss, tensor)[0] if loss.requires_grad else torch.zeros_like(tensor))
    torch.testing.assert_close(*gradients)
    assert [i for i, gradient in enumerate(computed) if gradient is not None] == [NAMES.index(wanted)]


def test_slopes_have_no_gradient() -> None:
    query, key, value = random_tensor(3, 1, 2, 5, 4)
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes has no gradient; pass alibi_slopes\.detach\(\)"):
        scaled_dot_product_attention(query, key, value, alibi_slopes=slopes)
    with torch.no_grad():
        scaled_dot_product_attention(query, key, value, alibi_slopes=slopes)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("moving", range(4))
def test_forward_mode_is_never_zero_in_silence(case: Case, moving: int) -> None:
    tensors = [tensor.detach() for tensor in finite(leaves(case))]
    if moving >= len(tensors):
        pytest.skip("has none")
    tangent = random_tensor(*tensors[moving].shape, dtype=torch.float64, seed=7)
    with forward_ad.dual_level():
        tensors[moving] = forward_ad.make_dual(tensors[moving], tangent)
        actual, expected = (
            [forward_ad.unpack_dual(result).tangent for result in function(case, plain=plain)(*tensors)]
            for plain in (False, True)
        )
    assert actual[0].any()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("outer", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("inner", [torch.func.jacrev, torch.func.jacfwd])
def test_hessians(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    for case in (SMALL, SMALL.but(key_heads=1, is_causal=True, softcap=0.8)):
        tensors = [tensor.detach() for tensor in leaves(case)]
        expected = torch.func.hessian(scalar(function(case, plain=True)))(*tensors)
        torch.testing.assert_close(outer(inner(scalar(function(case))))(*tensors), expected)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (2, 1, 0)], ids=str)
def test_vmap_and_gradients_of_each_sample(in_dims: tuple[int | None, ...]) -> None:
    tensors = [tensor.detach() for tensor in leaves(SMALL)]
    batched = [
        tensor if dim is None else torch.stack([tensor, tensor * 0.5, -tensor], dim)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    ours, plain = (function(SMALL, plain=plain) for plain in (False, True))
    torch.testing.assert_close(torch.vmap(ours, in_dims)(*batched), torch.vmap(plain, in_dims)(*batched))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = torch.vmap(torch.func.grad(scalar(ours), (0, 1, 2)), in_dims)(*batched)
    torch.testing.assert_close(actual, torch.vmap(torch.func.grad(scalar(plain), (0, 1, 2)), in_dims)(*batched))


def test_dropout_under_checkpointing() -> None:
    """The forward pass that runs again drops the same weights."""
    tensors = [tensor.requires_grad_() for tensor in random_tensor(3, 1, 2, 33, 8)]

    def gradients(checkpointed: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        call = lambda *args: scaled_dot_product_attention(*args, dropout_p=0.5)  # noqa: E731
        output = checkpoint(call, *tensors, use_reentrant=False) if checkpointed else call(*tensors)
        return torch.autograd.grad(output.square().sum(), tensors)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


def test_derivatives_without_private_names() -> None:
    """Where torch lacks a name that the lean registration needs, the public one gives the same derivatives."""
    run_fresh_python(
        """
import torch, torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function  # a private name that a later torch may not have
import myvision._dispatch.autograd
assert not myvision._dispatch.autograd._LEAN
from torch.autograd import gradcheck, gradgradcheck
from test_attention_graphs import CASES, finite, function, leaves
for case in CASES:
    assert gradcheck(function(case), finite(leaves(case)), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function(case), finite(leaves(case)), fast_mode=True)
"""
    )


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """Mixed inputs agree on autocast's dtype; a mask of float32 keeps its precision; float64 is left alone."""
    query, key, value, mask, *_ = PLAIN.but(mask="float32").tensors(torch.float32, device)
    leaves = [query.requires_grad_(), key.to(dtype).requires_grad_(), value.requires_grad_(), mask.requires_grad_()]
    with torch.autocast(device, dtype):
        output = scaled_dot_product_attention(*leaves)
        double = scaled_dot_product_attention(query.double(), key.double(), value.double())
    assert output.dtype == dtype
    assert double.dtype == torch.float64
    expected = scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), mask)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    for gradient, leaf in zip(torch.autograd.grad(output.sum(), leaves), leaves, strict=True):
        assert gradient.dtype == leaf.dtype


def test_meta_device() -> None:
    query, key, value = (tensor.to("meta") for tensor in PLAIN.tensors()[:3])
    output, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    assert output.device.type == lse.device.type == "meta"
    assert output.shape == (2, 4, 19, 12)
    assert lse.shape == (2, 4, 19)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overload", ["default", "with_lse"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case: Case, overload: str, device: str, opcheck_kinds: tuple[str, ...]) -> None:
    tensors = case.tensors(torch.float32, device)
    for i in range(4):
        if tensors[i] is not None and tensors[i].dtype == torch.float32:
            tensors[i].requires_grad_()
    arguments = *tensors, *case.options()
    torch.library.opcheck(getattr(_ops.attention, overload), arguments, test_utils=opcheck_kinds)


LAYOUTS = ["heads_inside", "contiguous", "packed_qkv", "permuted", "sliced"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        PLAIN.but(batch=1),
        PLAIN.but(heads=1, key_heads=1),
        PLAIN.but(queries=1),
        PLAIN.but(lengths=((3, 4), (1, 2))),
    ],
    ids=str,
)
def test_fakes_have_the_strides_of_the_real_ones(case: Case, layout: str, device: str) -> None:
    tensors = case.tensors(torch.float32, device, layout)
    grads = case.grad_outputs(torch.float32, device)
    real = [*case.run_forward(tensors)]
    real += _ops._attention_backward(*grads, *tensors, *real[::2], *case.options(), [True, True, True, False])[:3]
    with FakeTensorMode() as mode:
        fakes, fake_grads = ([t if t is None else mode.from_tensor(t) for t in some] for some in (tensors, grads))
        fake = [*case.run_forward(fakes)]
        fake += _ops._attention_backward(*fake_grads, *fakes, *fake[::2], *case.options(), [True, True, True, False])[
            :3
        ]
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


class Layer(nn.Module):
    """Attention between projections, as a model has it."""

    def __init__(self, heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return scaled_dot_product_attention(query, key, value, mask, **self.options).transpose(1, 2).flatten(2).sin()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"window": (2, 3), "causal_alignment": "bottom_right", "softcap": 2.0},
    {"dropout_p": 0.0, "scale": 0.3, "alibi_slopes": torch.tensor([0.1, 0.2])},
]


def count(graph: Any) -> int:
    return sum(getattr(node.target, "overloadpacket", None) is _ops.attention for node in graph.graph.nodes)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compile_is_one_graph_for_every_batch_and_length(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer, counter = Layer(**options), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for batch, length in ((3, 5), (4, 9), (2, 7)):
        x = torch.randn(batch, length, 8, requires_grad=True)
        expected, actual = layer(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        wanted = [x, *layer.parameters()]
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), wanted), torch.autograd.grad(expected.sum(), wanted)
        )
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "no size after the first compiles anything"
    graphs = [graph for graph in counter.graphs if len(graph.graph.nodes)]  # without an attempt that dynamo gave up
    assert [count(graph) for graph in graphs] == [1]


def test_inductor() -> None:
    torch._dynamo.reset()
    layer = Layer(is_causal=True)
    x, mask = torch.randn(2, 6, 8), torch.randn(6, 6).requires_grad_()
    wanted = [mask, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, mask).sum(), wanted), torch.autograd.grad(layer(x, mask).sum(), wanted)
    )


def test_dropout_in_a_compiled_graph_draws_anew() -> None:
    torch._dynamo.reset()
    tensors = random_tensor(3, 1, 2, 33, 8)
    compiled = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(compiled(*tensors), compiled(*tensors))


def test_packed_sequences_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(varlen_attention, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for lengths in ([3, 4, 5, 6], [5, 0, 6, 0, 1], [9, 8]):
        rows = random_tensor(3, sum(lengths), 2, 8)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        torch.testing.assert_close(compiled(*rows, ends, ends), varlen_attention(*rows, ends, ends))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "no number of sequences after the first compiles anything"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_export_shows_the_single_operator(options: dict[str, Any]) -> None:
    layer, free = Layer(**options), torch.export.Dim.DYNAMIC
    program = torch.export.export(layer, (torch.randn(2, 5, 8),), dynamic_shapes=({0: free, 1: free},))
    assert count(program) == 1
    assert count(program.run_decompositions()) == 1
    x = torch.randn(3, 9, 8)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_trace_shows_the_single_operator() -> None:
    layer = Layer(is_causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        trace = torch.jit.trace(layer, torch.randn(2, 5, 8))
    kinds = [node.kind() for node in trace.inlined_graph.nodes()]
    assert kinds.count("myvision::attention") == 1
    assert "prim::PythonOp" not in kinds
    x = torch.randn(3, 9, 8)
    torch.testing.assert_close(trace(x), layer(x))


def test_fx_traces_the_function_whole() -> None:
    layer = Layer(is_causal=True)
    graph = torch.fx.symbolic_trace(layer, concrete_args={"mask": None})
    assert sum(node.target is scaled_dot_product_attention for node in graph.graph.nodes) == 1
    x = torch.randn(3, 9, 8)
    torch.testing.assert_close(graph(x, None), layer(x))


def test_inference_shows_the_single_operator() -> None:
    """No private operator, and no lse, where nothing needs a gradient."""
    query, key, value, mask, *_ = PLAIN.but(mask="bool").tensors()
    with Recorder() as recorder:
        scaled_dot_product_attention(query, key, value, mask, is_causal=True, window=3)
    assert recorder.names == ["myvision::attention"]
