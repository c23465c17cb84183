"""deform_conv2d: the numbers, of the output and of the first derivatives."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from deform_conv2d_cases import CASES, NAMES, Case
from emulation import EMULATORS
from helpers import FLOATING_DTYPES, HALF_DTYPES, num_threads, run_python, with_layout
from hypothesis import given
from hypothesis import strategies as st

from myvision.ops import deform_conv2d

BACKWARD = torch.ops.myvision._deform_conv2d_backward


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case: Case, floating_dtype: torch.dtype, device: str) -> None:
    case.check(floating_dtype, device)


@pytest.mark.parametrize("case", [CASES[4], CASES[12]], ids=str)
def test_matches_the_oracle_in_every_layout(case: Case, floating_dtype: torch.dtype, layout: str, device: str) -> None:
    case.check(floating_dtype, device, layout)


@pytest.mark.parametrize("case", [CASES[4], CASES[14]], ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_float_offsets_beside_half_types(case: Case, dtype: torch.dtype, device: str) -> None:
    case.but(float_offset=True).check(dtype, device)


def test_strided_float_offsets_beside_half_types(device: str) -> None:
    case = CASES[4].but(float_offset=True)
    input, weight, offset, mask, bias = case.tensors(torch.bfloat16, device)
    permuted = [input, weight, with_layout(offset, "permuted"), mask, bias]
    grad_output = case.grad_output(torch.bfloat16, device)
    actual = [case.run(permuted), *case.gradients(permuted, grad_output)]
    plain = [input, weight, offset, mask, bias]
    torch.testing.assert_close(actual, [case.run(plain), *case.gradients(plain, grad_output)])


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle_deterministically(case: Case, floating_dtype: torch.dtype, device: str) -> None:
    case.check(floating_dtype, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_torchvision(case: Case) -> None:
    torchvision = pytest.importorskip("torchvision")
    tensors, grad_output = case.tensors(torch.float64), case.grad_output(torch.float64)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    input, weight, offset, mask, bias = leaves
    expected = torchvision.ops.deform_conv2d(
        input, offset, weight, bias, case.stride, case.padding, case.dilation, mask
    )
    torch.testing.assert_close(case.run(tensors), expected)
    wanted = [leaf for leaf in leaves if leaf is not None]
    actual = [gradient for gradient in case.gradients(tensors, grad_output) if gradient is not None]
    torch.testing.assert_close(actual, list(torch.autograd.grad(expected, wanted, grad_output)))


@pytest.mark.parametrize("case", [case for case in CASES if case.offset_groups == 1], ids=str)
def test_zero_offsets_are_a_convolution(case: Case, device: str) -> None:
    input, weight, offset, _, bias = case.tensors(torch.float64, device)
    actual = case.run([input, weight, torch.zeros_like(offset), None, bias])
    expected = F.conv2d(input, weight, bias, case.stride, case.padding, case.dilation, case.groups)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kernel", [(3, 3), (2, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(kernel: tuple[int, int], padding: str) -> None:
    case = Case(kernel=kernel, dilation=(1, 3), image=(8, 11))
    input, weight, *_ = case.tensors(torch.float64)
    expected = F.conv2d(input, weight, padding=padding, dilation=case.dilation)
    offset = input.new_zeros(case.batch, 2 * kernel[0] * kernel[1], *expected.shape[2:])
    actual = deform_conv2d(input, offset, weight, padding=padding, dilation=case.dilation)
    torch.testing.assert_close(actual, expected)


# ---- the border, and what is no number -------------------------------------------------------------------------------


def ramp(
    offset_y: float, offset_x: float = 0.0, *, dtype: torch.dtype = torch.float64, device: str
) -> list[torch.Tensor]:
    """One tap over the image [[1, 2], [3, 4]] at the top left: the sample, and its gradients by offset and input."""
    input = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=dtype, device=device, requires_grad=True)
    offset = torch.zeros(1, 2, 2, 2, dtype=dtype, device=device)
    offset[0, :, 0, 0] = torch.tensor([offset_y, offset_x], dtype=dtype, device=device)
    offset.requires_grad_()
    output = deform_conv2d(input, offset, torch.ones(1, 1, 1, 1, dtype=dtype, device=device))
    gradients = torch.autograd.grad(output[0, 0, 0, 0], [offset, input])
    return [output[0, 0, 0, 0].detach(), gradients[0][0, :, 0, 0], gradients[1][0, 0]]


@pytest.mark.parametrize(
    ("offset_y", "value", "slope"),
    [
        (0.0, 1.0, 2.0),
        (0.25, 1.5, 2.0),
        (1.0, 3.0, -3.0),  # on the last row: the derivative of the right-hand side, towards the zeros outside
        (1.75, 0.75, -3.0),
        (2.0, 0.0, 0.0),
        (-0.5, 0.5, 1.0),
        (-1.0, 0.0, 1.0),  # the last position that counts as inside
        (-1.0000001, 0.0, 0.0),
    ],
)
def test_border_rules(offset_y: float, value: float, slope: float, device: str) -> None:
    sample, gradient, _ = ramp(offset_y, device=device)
    torch.testing.assert_close(sample.item(), value)
    torch.testing.assert_close(gradient[0].item(), slope)


@pytest.mark.parametrize("coordinate", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 2.0**31, -(2.0**63)])
@pytest.mark.parametrize("axis", [0, 1])
def test_far_and_undefined_positions_are_zero(
    coordinate: float, axis: int, floating_dtype: torch.dtype, device: str
) -> None:
    offsets = [0.5, 0.5]
    offsets[axis] = coordinate
    for result in ramp(*offsets, dtype=floating_dtype, device=device):
        assert not result.any()


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[13]], ids=str)
def test_far_positions_touch_nothing_else(case: Case, floating_dtype: torch.dtype, device: str) -> None:
    tensors, grad_output = case.tensors(floating_dtype, device), case.grad_output(floating_dtype, device)
    for i, coordinate in enumerate([float("nan"), float("inf"), -float("inf"), 6e4, -6e4]):
        tensors[2].view(-1)[i * 7 :: 37] = coordinate
    exact = [t.double() for t in tensors]
    torch.testing.assert_close(case.run(tensors), case.run_reference(tensors))
    for actual, expected in zip(
        case.gradients(tensors, grad_output), case.reference_gradients(exact, grad_output.double()), strict=True
    ):
        torch.testing.assert_close(actual, expected.to(floating_dtype), atol=0.05, rtol=0.05)
        assert actual.isfinite().all()


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 3.0])
def test_positions_outside_have_no_slope_whatever_the_mask_is(
    factor: float, floating_dtype: torch.dtype, device: str
) -> None:
    case = CASES[0]
    tensors, grad_output = case.tensors(floating_dtype, device), case.grad_output(floating_dtype, device)
    tensors[2].fill_(1e4)
    tensors[3].fill_(factor)
    _, _, grad_offset, *_ = case.gradients(tensors, grad_output)
    assert not grad_offset.any()


def test_half_types_keep_exact_positions(device: str) -> None:
    input = torch.arange(300.0, device=device).expand(1, 1, 1, 300).to(torch.bfloat16)
    offset = torch.full((1, 2, 1, 300), 0.0, dtype=torch.bfloat16, device=device)
    offset[:, 1] = 0.5
    actual = deform_conv2d(input, offset, torch.ones(1, 1, 1, 1, dtype=torch.bfloat16, device=device))
    assert torch.equal(actual[..., 255].cpu(), torch.tensor([[[255.5]]]).to(torch.bfloat16))


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_empty_batch(floating_dtype: torch.dtype, device: str) -> None:
    case = Case(batch=0)
    tensors = case.tensors(floating_dtype, device)
    assert case.run(tensors).shape == (0, 6, 7, 9)
    for name, gradient, tensor in zip(
        NAMES, case.gradients(tensors, case.grad_output(floating_dtype, device)), tensors, strict=True
    ):
        assert gradient.shape == tensor.shape, name
        assert not gradient.any(), name


def test_no_output_channels(device: str) -> None:
    case = Case(out_channels=0)
    tensors = case.tensors(device=device)
    assert case.run(tensors).shape == (2, 0, 7, 9)
    assert not any(gradient.any() for gradient in case.gradients(tensors, case.grad_output(device=device)))


@given(data=st.data())
def test_any_geometry(device: str, data: st.DataObject) -> None:
    def pair(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.integers(low, high)), data.draw(st.integers(low, high))

    kernel, dilation, padding = pair(1, 4), pair(1, 3), pair(0, 3)
    smallest = [max(d * (k - 1) + 1 - 2 * p, 1) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    groups, offset_groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    case = Case(
        batch=data.draw(st.integers(1, 3)),
        in_channels=groups * offset_groups * data.draw(st.integers(1, 5)),
        image=(smallest[0] + data.draw(st.integers(0, 9)), smallest[1] + data.draw(st.integers(0, 9))),
        out_channels=groups * data.draw(st.integers(1, 9)),
        kernel=kernel,
        stride=pair(1, 3),
        padding=padding,
        dilation=dilation,
        groups=groups,
        offset_groups=offset_groups,
        mask=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        reach=data.draw(st.sampled_from([0.0, 1.0, 5.0])),
        float_offset=data.draw(st.booleans()),
    )
    dtype = data.draw(st.sampled_from(FLOATING_DTYPES))
    for name, actual, _, oracle in case.results(dtype, device):
        error = (actual.double() - oracle).abs().max()
        assert error <= 16 * torch.finfo(dtype).eps * max(oracle.abs().max(), 1), name


@given(
    orders=st.lists(st.permutations(range(4)), min_size=5, max_size=5),
    steps=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_any_strides(device: str, orders: list[list[int]], steps: list[int], dtype: torch.dtype) -> None:
    """Each tensor in an order of dimensions and with gaps of its own gives what contiguous ones give."""

    def restride(tensor: torch.Tensor, order: list[int], step: int) -> torch.Tensor:
        permuted = tensor.permute(order)
        spread = permuted.new_zeros([size * step for size in permuted.shape])[tuple([slice(None, None, step)] * 4)]
        return spread.copy_(permuted).permute([order.index(i) for i in range(4)])

    case = CASES[4]
    tensors, grad_output = case.tensors(dtype, device), case.grad_output(dtype, device)
    strided = [restride(t, order, step) for t, order, step in zip(tensors[:4], orders, steps, strict=False)]
    strided.append(tensors[4])
    torch.testing.assert_close(case.run(strided), case.run(tensors))
    actual = case.gradients(strided, restride(grad_output, orders[4], steps[4]))
    torch.testing.assert_close(actual, case.gradients(tensors, grad_output))


def test_expanded_grad_output(device: str) -> None:
    case = Case()
    tensors = case.tensors(torch.float64, device)
    expanded = torch.ones((), dtype=torch.float64, device=device).expand(case.grad_output().shape)
    torch.testing.assert_close(case.gradients(tensors, expanded), case.gradients(tensors, expanded.contiguous()))


@pytest.mark.parametrize("wanted", [[i == j for j in range(5)] for i in range(5)] + [[True, False, True, False, True]])
def test_only_the_wanted_gradients(wanted: list[bool], device: str) -> None:
    case = Case(in_channels=6, groups=2, offset_groups=3)
    tensors, grad_output = case.tensors(torch.float64, device), case.grad_output(torch.float64, device)
    every = BACKWARD(grad_output, *tensors[:4], *case.geometry, [True] * 5, False)
    some = BACKWARD(grad_output, *tensors[:4], *case.geometry, wanted, False)
    assert [gradient is not None for gradient in some] == wanted
    for one, other in zip(some, every, strict=True):
        assert one is None or torch.allclose(one, other)


# ---- layouts of what comes out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("input_layout", ["contiguous", "channels_last", "sliced", "permuted"])
@pytest.mark.parametrize("weight_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("in_channels", [1, 4])
def test_output_layout_is_that_of_conv2d(input_layout: str, weight_layout: str, in_channels: int) -> None:
    case = Case(in_channels=in_channels)
    input, weight, *others = case.tensors()
    input, weight = with_layout(input, input_layout), with_layout(weight, weight_layout)
    expected = F.conv2d(input, weight, padding=1)
    assert case.run([input, weight, *others]).stride() == expected.stride()


def test_channel_slice_of_channels_last_is_channels_last() -> None:
    input, *others = Case(in_channels=8).tensors(layout="channels_last")
    others[0] = others[0][:, :4]
    assert Case().run([input[:, :4], *others]).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted"])
def test_gradients_have_the_layout_of_their_tensor(layout: str, device: str) -> None:
    case = Case()
    tensors = case.tensors(device=device, layout=layout)
    for gradient, tensor in zip(case.gradients(tensors, case.grad_output(device=device)), tensors, strict=True):
        assert gradient.stride() == tensor.stride()


# ---- bitwise ---------------------------------------------------------------------------------------------------------

BITWISE = Case(batch=3, in_channels=40, out_channels=24, image=(19, 23), groups=2, offset_groups=4)


def test_forward_is_bitwise_equal_for_any_number_of_threads(floating_dtype: torch.dtype) -> None:
    tensors = BITWISE.tensors(floating_dtype)
    outputs = []
    for count in (1, 2, 3):
        with num_threads(count):
            outputs.append(BITWISE.run(tensors))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_forward_does_not_depend_on_the_rest_of_the_batch(device: str) -> None:
    input, weight, offset, mask, bias = BITWISE.tensors(device=device)
    whole = BITWISE.run([input, weight, offset, mask, bias])
    assert torch.equal(whole[1:2], BITWISE.run([input[1:2], weight, offset[1:2], mask[1:2], bias]))


@pytest.mark.usefixtures("_deterministic")
def test_backward_is_bitwise_equal_from_run_to_run(floating_dtype: torch.dtype, device: str) -> None:
    tensors, grad_output = BITWISE.tensors(floating_dtype, device), BITWISE.grad_output(floating_dtype, device)
    first, second = (BITWISE.gradients(tensors, grad_output) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# One group of channels over which workers have to share the offsets, and more images than workers.
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(
    "case", [BITWISE, BITWISE.but(groups=1, offset_groups=1), Case(batch=33, in_channels=6, out_channels=8)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_is_bitwise_equal_for_any_number_of_threads(case: Case, dtype: torch.dtype) -> None:
    tensors, grad_output = case.tensors(dtype), case.grad_output(dtype)
    gradients = {}
    for count in (1, 2, 3, 8, 37, 64):
        with num_threads(count):
            gradients[count] = case.gradients(tensors, grad_output)
    for count, others in gradients.items():
        for name, other, first in zip(NAMES, others, gradients[1], strict=True):
            assert torch.equal(other, first), f"the gradient of {name} with {count} threads"


# ---- processes of their own ------------------------------------------------------------------------------------------


def test_every_instruction_set(instruction_set: str) -> None:
    run_python(
        f"""
import torch
from deform_conv2d_cases import CASES
assert torch.ops.myvision._cpu_capability().lower() == {instruction_set!r}
for case in [*CASES[3:5], *CASES[12:14], CASES[4].but(float_offset=True)]:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        case.check(dtype)
""",
        instruction_set,
    )


@pytest.mark.parametrize("device", ["cpu", *EMULATORS], indirect=True)  # a GPU would have to own all of the storage
def test_offsets_in_memory_past_32_bits(device: str) -> None:
    """Images and channels that lie more than 2^31 elements apart, in a storage of which little is ever touched."""
    case = Case(in_channels=3, out_channels=2)
    tensors, grad_output = case.tensors(torch.bfloat16), case.grad_output(torch.bfloat16)
    strided = [_spread(t, dim, 2**30 + 7) for t, dim in zip(tensors[:4], (1, 0, 0, 1), strict=True)]
    assert strided[0].stride(1) * 2 > 2**31
    strided.append(tensors[4])
    torch.testing.assert_close(case.run(strided), case.run(tensors))
    for actual, expected in zip(
        case.gradients(strided, grad_output), case.gradients(tensors, grad_output), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def _spread(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """A copy whose storage has ``stride`` elements between neighbours along ``dim``."""
    inner = tensor.select(dim, 0)
    strides = list(inner.contiguous().stride())
    strides.insert(dim, stride)
    storage = torch.empty(stride * (tensor.shape[dim] - 1) + inner.numel(), dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux")
def test_forward_needs_little_memory_of_its_own() -> None:
    printed = run_python(
        """
import resource, torch, myvision
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def call(batch, channels, size):
    x = torch.full((batch, channels, size, size), 0.5)
    weight, offset = torch.full((channels, channels, 3, 3), 0.1), torch.full((batch, 18, size, size), 0.25)
    before = peak()
    output = myvision.ops.deform_conv2d(x, offset, weight, padding=1)
    return peak() - before - output.numel() * 4 / 2**20
call(2, 32, 8)
print(call(32, 256, 64))
"""
    )
    assert float(printed) <= 32, f"{printed.strip()} MiB besides the output"
