"""my_add: 2 * x + y."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from emulation import EMULATORS
from helpers import (
    FLOATING_DTYPES,
    INTEGER_DTYPES,
    assert_as_accurate,
    num_threads,
    random_tensor,
    run_python,
    with_layout,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import myvision
from myvision._formulas.my_add import my_add as reference
from myvision.ops import my_add

ALL_DTYPES = [*FLOATING_DTYPES, *INTEGER_DTYPES]
BROADCASTS = [
    ((), ()),
    ((7,), ()),
    ((0,), (1,)),
    ((3, 0, 5), (5,)),
    ((64,), (64,)),
    ((2, 3, 4, 5), (3, 1, 1)),
    ((2, 1, 4, 1), (3, 1, 5)),
    ((1031, 67), (67,)),
    ((67, 1031), (67, 1)),
]


def torch_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(y, x, alpha=2)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x_shape", "y_shape"), BROADCASTS)
def test_matches_oracle(device: str, floating_dtype: torch.dtype, x_shape: tuple[int, ...], y_shape: tuple[int, ...]):
    x = random_tensor(*x_shape, dtype=floating_dtype, device=device, seed=1)
    y = random_tensor(*y_shape, dtype=floating_dtype, device=device, seed=2)
    assert_as_accurate(my_add(x, y), reference(x, y), reference(x.double(), y.double()))


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
@pytest.mark.parametrize(("x_shape", "y_shape"), BROADCASTS)
def test_integers_are_exact(device: str, dtype: torch.dtype, x_shape: tuple[int, ...], y_shape: tuple[int, ...]):
    x = random_tensor(*x_shape, dtype=dtype, device=device, seed=1)
    y = random_tensor(*y_shape, dtype=dtype, device=device, seed=2)
    assert torch.equal(my_add(x, y), reference(x, y))


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_integers_wrap_around(device: str, dtype: torch.dtype):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.max, limits.min, limits.max] * 50, dtype=dtype, device=device)
    assert torch.equal(my_add(x, x.flip(0)), reference(x, x.flip(0)))


def test_special_values(device: str, floating_dtype: torch.dtype):
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0], dtype=floating_dtype, device=device
    )
    x, y = (grid.flatten() for grid in torch.meshgrid(special, special, indexing="ij"))
    actual, expected = my_add(x, y), reference(x, y)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())


def test_half_types_are_rounded_once(device: str):
    for dtype in (torch.float16, torch.bfloat16):
        x, y = (random_tensor(4096, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
        assert torch.equal(my_add(x, y), reference(x.float(), y.float()).to(dtype))


def test_layouts(device: str, layout: str):
    x, y = (with_layout(random_tensor(3, 5, 7, 11, device=device, seed=seed), layout) for seed in (1, 2))
    output = my_add(x, y)
    assert torch.equal(output, reference(x, y))
    assert output.stride() == torch_add(x, y).stride()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("start", [0, 1, 16])  # 16 elements are a multiple of 16 bytes, one is not
@pytest.mark.parametrize("pitch", [48, 49])
def test_rows_that_are_aligned_and_not(device: str, dtype: torch.dtype, start: int, pitch: int):
    x, y = (
        random_tensor(start + 5 * pitch, dtype=dtype, device=device, seed=seed)[start:].view(5, pitch)[:, :32]
        for seed in (1, 2)
    )
    for operands in ((x, y), (x, y.contiguous()), (x.contiguous(), y)):
        torch.testing.assert_close(my_add(*operands), reference(x, y))


def test_channels_last_with_broadcast_bias(device: str):
    x = with_layout(random_tensor(2, 8, 5, 5, device=device), "channels_last")
    output = my_add(x, random_tensor(8, 1, 1, device=device))
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("x_dtype", [*ALL_DTYPES, torch.bool])
@pytest.mark.parametrize("y_dtype", [*ALL_DTYPES, torch.bool])
@pytest.mark.parametrize("shapes", [((6,), (6,)), ((6,), ()), ((), (6,)), ((), ())])
def test_promotes_as_torch_add(x_dtype: torch.dtype, y_dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]):
    if x_dtype == y_dtype == torch.bool:
        pytest.skip("refused")
    x, y = random_tensor(*shapes[0], dtype=x_dtype, seed=1), random_tensor(*shapes[1], dtype=y_dtype, seed=2)
    actual, expected = my_add(x, y), torch_add(x, y)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


@st.composite
def operand(draw: st.DrawFn, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor that broadcasts to the shape: dimensions missing or single, memory permuted, sliced, expanded."""
    own = [1 if draw(st.booleans()) and draw(st.booleans()) else size for size in shape]
    own = own[draw(st.integers(0, len(own))) if draw(st.booleans()) and draw(st.booleans()) else 0 :]
    order = draw(st.permutations(range(len(own))))
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in own]
    tensor = random_tensor(*(own[dim] * steps[dim] for dim in order), dtype=dtype, seed=draw(st.integers(0, 99)))
    tensor = tensor.permute([order.index(dim) for dim in range(len(own))])
    for dim, step in enumerate(steps):
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
        if own[dim] > 1 and draw(st.booleans()) and draw(st.booleans()):
            tensor = tensor.narrow(dim, 0, 1).expand(*tensor.shape[:dim], own[dim], *tensor.shape[dim + 1 :])
    return tensor


@st.composite
def operands(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), max_size=5))
    dtypes = st.sampled_from(ALL_DTYPES)
    x_dtype = draw(dtypes)
    y_dtype = draw(dtypes) if draw(st.booleans()) else x_dtype
    return draw(operand(shape, x_dtype)), draw(operand(shape, y_dtype))


@given(tensors=operands())
def test_any_strides(device: str, tensors: tuple[Tensor, Tensor]):
    """Values, dtype and strides are torch.add's; the fake says the same without computing."""
    x, y = (tensor.to(device) for tensor in tensors)
    actual, expected = my_add(x, y), torch_add(x, y)
    assert actual.dtype == expected.dtype
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected)
    with FakeTensorMode() as mode:
        fake = my_add(mode.from_tensor(x), mode.from_tensor(y))
    assert (fake.shape, fake.stride(), fake.dtype) == (actual.shape, actual.stride(), actual.dtype)


def test_channels_last_3d_and_single_channel_strides():
    for shape in [(2, 3, 4, 5, 6), (2, 1, 4, 5, 6)]:
        x = random_tensor(*shape).contiguous(memory_format=torch.channels_last_3d)
        assert my_add(x, x).stride() == torch_add(x, x).stride()
    x = torch.empty_strided((2, 1, 3, 4), (12, 1, 4, 1)).normal_()
    y = torch.empty_strided((2, 1, 3, 4), (12, 7, 4, 1)).normal_()
    assert my_add(x, y).stride() == torch_add(x, y).stride()


# ---- instruction sets, threads, size ---------------------------------------------------------------------------------


def test_every_instruction_set_gives_the_same_bits(instruction_set: str):
    code = """
import torch, myvision
from helpers import FLOATING_DTYPES, INTEGER_DTYPES, random_tensor
from myvision._formulas.my_add import my_add as reference
for dtype in (*FLOATING_DTYPES, *INTEGER_DTYPES):
    for size in (1, 7, 64, 1000, 100_003):
        x, y = random_tensor(size, dtype=dtype, seed=1), random_tensor(size, dtype=dtype, seed=2)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        for b in (y, y[:1]):
            expected = reference(x.to(wide), b.to(wide)).to(dtype)
            assert torch.equal(myvision.ops.my_add(x, b), expected), (dtype, size)
print(torch.ops.myvision._cpu_capability().lower())
"""
    assert run_python(code, instruction_set).strip() == instruction_set


@pytest.mark.parametrize("y_shape", [(700, 431), (431,), (700, 1)])
def test_threads_do_not_change_bits(layout: str, y_shape: tuple[int, ...]):
    x, y = with_layout(random_tensor(700, 431, seed=1), layout), random_tensor(*y_shape, seed=2)
    with num_threads(1):
        alone = my_add(x, y)
    for count in (2, 3):
        with num_threads(count):
            assert torch.equal(my_add(x, y), alone)


def test_more_than_two_to_the_31_elements(real_device: str):
    """Expanded operands keep it at one tensor of 2 GiB."""
    size = 2**31 + 5
    x = torch.zeros(1, dtype=torch.int8, device=real_device).expand(size)
    y = torch.arange(7, dtype=torch.int8, device=real_device)[:1].expand(size)
    output = my_add(x + 0 if real_device == "cuda" else x, y)
    assert output.numel() == size
    assert output[-1] == 0


@pytest.mark.parametrize("device", ["cpu", *EMULATORS], indirect=True)  # a GPU would have to own all of the storage
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_offsets_in_memory_past_32_bits(device: str, dtype: torch.dtype):
    """Rows that lie more than 2^31 elements apart, in a storage of which little is ever touched."""
    gap = 2**31 + 16
    x = torch.empty(gap + 40, dtype=dtype).as_strided((2, 40), (gap, 1)).copy_(random_tensor(2, 40, dtype=dtype))
    y = random_tensor(2, 40, dtype=dtype, seed=1)
    assert torch.equal(my_add(x, y), reference(x.contiguous(), y))
    assert torch.equal(my_add(x[:, 1:], y[:, 1:]), reference(x[:, 1:].contiguous(), y[:, 1:]))


def test_a_forked_worker_computes_after_threads_were_used():
    code = """
import torch, myvision
from torch.utils.data import DataLoader
x = torch.ones(1_000_000)
torch.set_num_threads(2)
myvision.ops.my_add(x, x)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return myvision.ops.my_add(x, x).sum()
print(sum(batch.sum().item() for batch in DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")))
"""
    assert float(run_python(code)) == 12_000_000


# ---- bad input -------------------------------------------------------------------------------------------------------

BAD_INPUT: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], str]] = {
    "shapes": (
        lambda: (torch.ones(2, 3), torch.ones(2)),
        "my_add: shapes must broadcast together, but got x of (2, 3) and y of (2,)",
    ),
    "complex": (
        lambda: (torch.ones(2, dtype=torch.complex64), torch.ones(2)),
        "my_add: tensors must have floating-point or integer dtypes, but got x of complex64 and y of float32",
    ),
    "complex scalar": (
        lambda: (torch.ones(2), torch.ones((), dtype=torch.complex128)),
        "my_add: tensors must have floating-point or integer dtypes, but got x of float32 and y of complex128",
    ),
    "bool": (
        lambda: (torch.ones(2, dtype=torch.bool),) * 2,
        "my_add: tensors must have floating-point or integer dtypes, but got x of bool and y of bool",
    ),
    "float8": (
        lambda: (torch.ones(2).to(torch.float8_e5m2),) * 2,
        "my_add: tensors must have floating-point or integer dtypes, but got x of float8_e5m2 and y of float8_e5m2",
    ),
    "uint16": (
        lambda: (torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.uint8)),
        "my_add: tensors must have floating-point or integer dtypes, but got x of uint16 and y of uint8",
    ),
    "dimensions": (
        lambda: (torch.ones([1] * 65), torch.ones(1)),
        "my_add: tensors must have at most 64 dimensions, but got x with 65 and y with 1",
    ),
    "no tensor": (lambda: (torch.ones(1), None), "my_add: y must be a tensor, but is None"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_raises_in_the_same_words_everywhere(device: str, case: str):
    make, message = BAD_INPUT[case]
    operator = torch.ops.myvision.my_add.default
    x, y = (tensor if tensor is None else tensor.to(device) for tensor in make())
    with pytest.raises(RuntimeError) as of_kernel:
        operator(x, y)
    with torch.inference_mode(), pytest.raises(RuntimeError) as of_inference:
        operator(x, y)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError) as of_fake:
        operator(*(tensor if tensor is None else mode.from_tensor(tensor) for tensor in (x, y)))
    assert [str(error.value) for error in (of_kernel, of_inference, of_fake)] == [message] * 3


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("value", [[1.0], None, 1.0])
def test_what_is_no_tensor_is_told_by_name(name: str, value: object):
    with pytest.raises(TypeError, match=f"^my_add: {name} must be a tensor, but got {type(value).__name__}$"):
        my_add(**{"x": torch.ones(1), "y": torch.ones(1), name: value})  # type: ignore[arg-type]


def test_device_mismatch_raises(gpu: str):
    x, y = torch.ones(2, device=gpu), torch.ones(2)
    with pytest.raises(RuntimeError, match="one device"):
        my_add(x, y)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="device"):
        my_add(mode.from_tensor(x), mode.from_tensor(y))


def test_device_mismatch_raises_in_the_fake():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        my_add(torch.ones(2), torch.ones(2, device="cuda"))


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x_shape", "y_shape"), [((3,), (3,)), ((), (2,)), ((3, 1, 2), (2, 2)), ((2, 0), (1,))])
def test_gradients(device: str, x_shape: tuple[int, ...], y_shape: tuple[int, ...]):
    inputs = tuple(
        random_tensor(*shape, dtype=torch.float64, device=device).requires_grad_() for shape in (x_shape, y_shape)
    )
    assert torch.autograd.gradcheck(my_add, inputs, check_forward_ad=True, check_batched_grad=0 not in x_shape)
    assert torch.autograd.gradgradcheck(my_add, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_only_needed_gradients_are_computed(needed: tuple[bool, bool]):
    x, y = (random_tensor(4).requires_grad_(need) for need in needed)
    gradients = my_add(x, y).grad_fn.apply(torch.ones(4))  # type: ignore[union-attr]
    assert [gradient is not None for gradient in gradients] == list(needed)


@pytest.mark.parametrize("x_dtype", FLOATING_DTYPES)
@pytest.mark.parametrize("y_dtype", [*FLOATING_DTYPES, torch.int64])
def test_gradients_of_mixed_types(x_dtype: torch.dtype, y_dtype: torch.dtype):
    x = random_tensor(3, 4, dtype=x_dtype).requires_grad_()
    y = random_tensor(4, dtype=y_dtype).requires_grad_(y_dtype.is_floating_point)
    my_add(x, y).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))  # type: ignore[arg-type]
    if y_dtype.is_floating_point:
        assert torch.equal(y.grad, torch.full_like(y, 3))  # type: ignore[arg-type]


def test_forward_mode_with_an_integer_operand():
    x, y = random_tensor(3), torch.arange(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        assert torch.equal(forward_ad.unpack_dual(my_add(dual, y)).tangent, torch.full((3,), 2.0))
        assert torch.equal(forward_ad.unpack_dual(my_add(y, dual)).tangent, torch.ones(3))


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 1), (2, 1)])
def test_vmap(in_dims: tuple[int | None, int | None]):
    x, y = random_tensor(3, 3, 3, seed=1), random_tensor(3, 3, seed=2)
    expected = torch.vmap(reference, in_dims)(x, y)
    assert torch.equal(torch.vmap(my_add, in_dims)(x, y), expected)


def test_vmap_promotes_by_the_dimensions_of_each_sample():
    x, y = torch.ones(5, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float16)
    assert torch.vmap(my_add)(x, y).dtype == torch.float16


# ---- every other room of torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(device: str, requires_grad: bool, layout: str):
    x = with_layout(random_tensor(2, 3, 4, 5, device=device), layout).requires_grad_(requires_grad)
    torch.library.opcheck(torch.ops.myvision.my_add.default, (x, random_tensor(3, 1, 1, device=device)))


def test_compiles_to_one_dynamic_graph():
    frames: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        frames.append(graph)
        return graph

    compiled = torch.compile(my_add, fullgraph=True, dynamic=True, backend=backend)
    for rows in (2, 3, 17):
        x, y = random_tensor(rows, 5), random_tensor(5)
        assert torch.equal(compiled(x, y), my_add(x, y))
    assert len(frames) == 1
    assert [node.target for node in frames[0].graph.nodes if node.op == "call_function"] == [
        torch.ops.myvision.my_add.default
    ]


def test_gradients_through_compile():
    compiled = torch.compile(
        lambda x, y: my_add(x.sin(), y).square().sum(), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    x, y = random_tensor(4, 3).requires_grad_(), random_tensor(3).requires_grad_()
    compiled(x, y).backward()
    expected = torch.autograd.grad(reference(x.sin(), y).square().sum(), (x, y))
    torch.testing.assert_close((x.grad, y.grad), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_trace_shows_the_single_operator():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return my_add(x, self.bias)

    traced = torch.jit.trace(Model(), torch.zeros(2, 3))
    assert [node.kind() for node in traced.inlined_graph.nodes()].count("myvision::my_add") == 1
    assert not traced.inlined_graph.findAllNodes("prim::PythonOp")
    assert torch.equal(traced(torch.ones(5, 3)), torch.full((5, 3), 3.0))


def test_export_shows_the_single_operator():
    rows = torch.export.Dim("rows")
    program = torch.export.export(
        myvision.nn.MyAdd(), (torch.zeros(2, 3), torch.zeros(3)), dynamic_shapes=({0: rows}, None)
    )
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
        torch.ops.myvision.my_add.default
    ]
    assert torch.equal(program.module()(torch.ones(4, 3), torch.ones(3)), torch.full((4, 3), 3.0))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
def test_autocast_leaves_types_as_torch_add_does(device: str, dtypes: tuple[torch.dtype, torch.dtype]):
    x, y = (random_tensor(3, dtype=dtype, device=device) for dtype in dtypes)
    with torch.autocast(device, torch.bfloat16):
        assert my_add(x, y).dtype == torch_add(x, y).dtype


def test_meta_device():
    x = torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last)
    output = my_add(x, torch.empty(5, dtype=torch.float64, device="meta"))
    assert output.dtype == torch.float64
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_inference_mode():
    with torch.inference_mode():
        output = my_add(torch.ones(2), torch.ones(2))
    assert output.is_inference()
    assert torch.equal(output, torch.full((2,), 3.0))


def test_module():
    x, y = random_tensor(2, 3), random_tensor(3)
    module = myvision.nn.MyAdd()
    for variant in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(variant(x, y), reference(x, y))
    assert repr(module) == "MyAdd()"


def test_scripted_module_and_whole_model_on_disk(tmp_path):
    torch.save(myvision.nn.MyAdd().state_dict(), tmp_path / "state.pt")
    assert myvision.nn.MyAdd().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
