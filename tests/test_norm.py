"""The norms: the numbers of the outputs and of the first derivatives, which all functions have in common."""

from __future__ import annotations

import math

import pytest
import torch
from emulation import EMULATORS
from helpers import num_threads, random_tensor, run_python, with_layout
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import ACTIVATIONS, CASES, NAMES, WITH_ACTIVATION, Case
from torch import Tensor

from myvision._formulas._activation import activate
from myvision.ops import rms_norm


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle_in_every_layout(case: Case, floating_dtype: torch.dtype, layout: str, device: str) -> None:
    case.check(floating_dtype, device, layout)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_parameters_in_float32(case: Case, dtype: torch.dtype, device: str) -> None:
    case.but(parameter_dtype=torch.float32).check(dtype, device)


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float64),
    (torch.float64, torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "parameter_dtype"), MIXED)
def test_parameters_of_another_type(case: Case, dtype: torch.dtype, parameter_dtype: torch.dtype, device: str) -> None:
    """The output is of the input's type, as torch's rms_norm gives it, and gradients are of their tensor's."""
    case = case.but(parameter_dtype=parameter_dtype)
    tensors, grad_outputs = case.tensors(dtype, device), case.grad_outputs(dtype, device)
    same = [t if t is None or i in (0, 3) else t.double() for i, t in enumerate(tensors)]
    for actual, expected in zip(case.run(tensors), case.run_reference(same), strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected)
    given = [t for t in tensors[:4] if t is not None]
    gradients = case.gradients(tensors, grad_outputs), case.gradients(same, grad_outputs, reference=True)
    for tensor, actual, expected in zip(given, *gradients, strict=True):
        assert actual.dtype == tensor.dtype
        torch.testing.assert_close(actual, expected.to(tensor.dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", WITH_ACTIVATION, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_activations(case: Case, activation: str, residual: bool, layout: str, device: str) -> None:
    case = case.but(activation=activation, residual=residual)
    for dtype in (torch.float32, torch.bfloat16):
        case.check(dtype, device, layout)


@pytest.mark.parametrize("case", WITH_ACTIVATION, ids=str)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("affine", [True, False])
def test_without_parameters_and_residual(case: Case, activation: str | None, affine: bool, device: str) -> None:
    case.but(affine=affine, residual=not affine, activation=activation).check(torch.float32, device)


LAYOUTS_OF_IMAGES = ["contiguous", "channels_last", "permuted"]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS_OF_IMAGES)
@pytest.mark.parametrize("grad_layout", LAYOUTS_OF_IMAGES)
def test_gradients_of_outputs_in_another_layout(case: Case, layout: str, grad_layout: str, device: str) -> None:
    activation = "gelu" if case.has_activation else None
    case.but(shape=(2, 9, 4, 5), activation=activation).check(torch.float32, device, layout, grad_layout)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("input_layout", LAYOUTS_OF_IMAGES)
@pytest.mark.parametrize("residual_layout", LAYOUTS_OF_IMAGES)
def test_residuals_in_another_layout(case: Case, input_layout: str, residual_layout: str, device: str) -> None:
    case = case.but(activation="relu" if case.has_activation else None)
    expected_tensors = case.tensors(torch.float64, device)
    expected = case.run_reference(expected_tensors)
    input, *parameters, residual = expected_tensors[:4]
    tensors = [with_layout(input, input_layout), *parameters, with_layout(residual, residual_layout)]
    torch.testing.assert_close(case.run([*tensors, *expected_tensors[4:]]), expected)
    torch.testing.assert_close(
        case.gradients([*tensors, *expected_tensors[4:]], case.grad_outputs(torch.float64, device)),
        case.gradients(expected_tensors, case.grad_outputs(torch.float64, device), reference=True),
    )


# ---- shapes ----------------------------------------------------------------------------------------------------------

CHANNELS = [case for case in CASES if not case.normalises_rows]
ROWS = [case for case in CASES if case.normalises_rows and case.channels == "last" and case.normalized_dims == 1]
FIRST = [case for case in CASES if case.channels == "first"]


@pytest.mark.parametrize("case", [*CHANNELS, *FIRST], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 2),
        (5, 3, 16),
        (2, 1, 1, 7),
        (2, 2, 1, 3, 2),
        (3, 6, 2, 3, 2),
        (1, 70, 3, 3),
        (2, 33, 9, 1),
        (2, 16, 8, 8),
        (1, 3, 31, 33),
        (1, 2, 3, 769),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "offset"])
def test_shapes_of_images(case: Case, shape: tuple[int, ...], layout: str, device: str) -> None:
    case = case.but(shape=shape, groups=1 if shape[1] % 3 else 3)
    for dtype in (torch.float32, torch.float16):
        case.check(dtype, device, layout)


@pytest.mark.parametrize("channels", range(1, 71, 3))
def test_numbers_of_channels(channels: int, device: str) -> None:
    for case in (*CHANNELS, *FIRST):
        case = case.but(shape=(2, channels, 3, 5), groups=channels)
        for layout in ("contiguous", "channels_last"):
            case.check(torch.float32, device, layout)


@pytest.mark.parametrize("case", ROWS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 17, 64, 100, 768, 1031, 4097])
@pytest.mark.parametrize("rows", [1, 5])
def test_lengths_of_rows(case: Case, length: int, rows: int, device: str) -> None:
    case = case.but(shape=(rows, length))
    for dtype in (torch.float32, torch.bfloat16):
        case.check(dtype, device)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_a_row_of_one_dimension(case: Case, device: str) -> None:
    case.but(shape=(37,)).check(torch.float32, device)


# Sums of this many numbers are merged from chunks.
LARGE = [
    Case("batch_norm", (2, 2, 100_003)),
    Case("batch_norm", (3, 5, 127, 67)),
    Case("instance_norm", (1, 2, 100_003)),
    Case("group_norm", (1, 6, 101, 97)),
    Case("layer_norm", (2, 100_003)),
    Case("rms_norm", (2, 100_003)),
    Case("layer_norm", (1, 1031, 3, 3), channels="first"),
    Case("layer_norm", (1031, 67)),
    Case("rms_norm", (1031, 67)),
    Case("add_layer_norm", (3, 20_011)),
    Case("add_rms_norm", (1031, 67)),
]


@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted"])
def test_many_numbers(case: Case, layout: str) -> None:
    for dtype in (torch.float32, torch.float16):
        case.check(dtype, "cpu", layout)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(0, 6, 5, 4), (3, 6, 0, 4)], ids=str)
def test_empty_tensors(case: Case, shape: tuple[int, ...], floating_dtype: torch.dtype, device: str) -> None:
    case = case.but(shape=shape, activation="gelu" if case.has_activation else None)
    tensors, grad_outputs = case.tensors(floating_dtype, device), case.grad_outputs(floating_dtype, device)
    for output in case.run(tensors):
        assert output.shape == shape
        assert output.dtype == floating_dtype
    present = [tensor for tensor in tensors[:4] if tensor is not None]
    for gradient, tensor in zip(case.gradients(tensors, grad_outputs), present, strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_of_outputs_and_gradients(case: Case, layout: str, device: str) -> None:
    """channels_last comes out as it goes in, and anything else contiguous; except of rows, which are contiguous."""
    for output in case.run(case.tensors(torch.float32, device, layout)):
        images_last = layout == "channels_last" and not (case.normalises_rows and case.channels == "last")
        assert output.is_contiguous(memory_format=torch.channels_last if images_last else torch.contiguous_format)


@given(
    case=st.sampled_from(CASES),
    orders=st.lists(st.permutations(range(4)), min_size=3, max_size=3),
    steps=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_any_strides(
    device: str, case: Case, orders: list[list[int]], steps: list[int], activation: str | None, dtype: torch.dtype
) -> None:
    """Each tensor in an order of dimensions and with gaps of its own gives what contiguous ones give."""

    def restride(tensor: Tensor, order: list[int], step: int) -> Tensor:
        permuted = tensor.permute(order)
        spread = permuted.new_zeros([size * step for size in permuted.shape])[tuple([slice(None, None, step)] * 4)]
        return spread.copy_(permuted).permute([order.index(i) for i in range(4)])

    case = case.but(shape=(2, 6, 3, 5), activation=activation if case.has_activation else None)
    tensors, grad_outputs = case.tensors(dtype, device), case.grad_outputs(dtype, device)
    strided = list(tensors)
    strided[0] = restride(tensors[0], orders[0], steps[0])
    strided[3] = restride(tensors[3], orders[1], steps[1])
    torch.testing.assert_close(case.run(strided), case.run(tensors))
    strided_gradients = [restride(g, orders[2], steps[2]) for g in grad_outputs]
    torch.testing.assert_close(case.gradients(strided, strided_gradients), case.gradients(tensors, grad_outputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_expanded_tensors(case: Case, device: str) -> None:
    tensors, grad_outputs = case.tensors(torch.float64, device), case.grad_outputs(torch.float64, device)
    tensors[0] = tensors[0][:, :, :, :1].expand(case.shape)
    tensors[3] = tensors[3][:1].expand(case.shape)
    expanded = [g[:1, :1].expand(case.shape) for g in grad_outputs]
    torch.testing.assert_close(case.run(tensors), case.run_reference(tensors))
    torch.testing.assert_close(
        case.gradients(tensors, expanded), case.gradients(tensors, expanded, reference=True), equal_nan=True
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_that_are_not_contiguous(case: Case, device: str) -> None:
    tensors = case.tensors(torch.float32, device)
    spread = [t if t is None or i in (0, 3) else torch.stack([t, t], -1)[..., 0] for i, t in enumerate(tensors)]
    assert not any(t.is_contiguous() for t in spread[1:3] if t is not None)
    torch.testing.assert_close(case.run(spread), case.run(tensors), rtol=0, atol=0)
    grad_outputs = case.grad_outputs(torch.float32, device)
    torch.testing.assert_close(case.gradients(spread, grad_outputs), case.gradients(tensors, grad_outputs))


# ---- numbers that are hard -------------------------------------------------------------------------------------------

BY_OWN_STATISTICS = [case for case in CASES if case.training]
CENTERED = [case for case in BY_OWN_STATISTICS if case.has_bias]


@pytest.mark.parametrize("case", CENTERED, ids=str)
@pytest.mark.parametrize("offset", [1e4, -2e3, 1e6])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_tiny_spread_far_from_zero(case: Case, offset: float, layout: str, device: str) -> None:
    """The mean is kept to more digits than a float has: the error is that of the input's rounding, no more."""
    case = case.but(shape=(4, 6, 9, 16), eps=0.0)
    tensors = case.tensors(torch.float32, device, layout)
    tensors[0] = with_layout(tensors[0] * (abs(offset) * 1e-6) + offset, layout)
    if case.adds:
        tensors[3] = torch.zeros_like(tensors[3])
    exact = [t if t is None else t.double() for t in tensors]
    output, oracle = case.run(tensors)[0], case.run_reference(exact)[0]
    torch.testing.assert_close(output.double(), oracle, rtol=2e-5, atol=2e-5)
    grad_outputs = case.grad_outputs(torch.float32, device)
    for name, actual, expected in zip(
        NAMES,
        case.gradients(tensors, grad_outputs),
        case.gradients(exact, [g.double() for g in grad_outputs], reference=True),
        strict=True,
    ):
        error = (actual.double() - expected).abs().max()
        assert error <= 1e-4 * expected.abs().max(), name


@pytest.mark.parametrize("case", CENTERED, ids=str)
@pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e4 + 0.1, -65000.0, 0.0])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_constants_give_exactly_the_bias(
    case: Case, constant: float, floating_dtype: torch.dtype, layout: str, device: str
) -> None:
    case = case.but(shape=(4, 6, 7, 11), residual=False, eps=1e-5)
    tensors = case.tensors(floating_dtype, device, layout)
    tensors[0] = torch.full_like(tensors[0], constant)
    if case.adds:
        tensors[3] = torch.zeros_like(tensors[3])
    bias = tensors[2]
    if not (case.normalises_rows and case.channels == "last"):
        bias = bias[:, None, None]
    torch.testing.assert_close(case.run(tensors)[0], bias.expand(case.shape), rtol=0, atol=0)


@pytest.mark.parametrize("case", BY_OWN_STATISTICS, ids=str)
def test_eps_of_zero(case: Case, device: str) -> None:
    case.but(eps=0.0).check(torch.float32, device)


@pytest.mark.parametrize("case", BY_OWN_STATISTICS, ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e12])
def test_tiny_and_huge_spread(case: Case, scale: float, device: str) -> None:
    """No variance is clamped, and none of these overflows."""
    case = case.but(eps=1e-30)
    tensors = case.tensors(torch.float32, device)
    tensors[0] = tensors[0] * scale
    if case.adds:
        tensors[3] = tensors[3] * scale
    exact = [t if t is None else t.double() for t in tensors]
    torch.testing.assert_close(case.run(tensors)[0].double(), case.run_reference(exact)[0], rtol=1e-5, atol=1e-5)


HUGE = [(torch.float32, 100), (torch.float32, 126), (torch.bfloat16, 120), (torch.float64, 1022)]


@pytest.mark.parametrize("case", BY_OWN_STATISTICS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("dtype", "exponent"), HUGE)
def test_sums_that_overflow(case: Case, layout: str, dtype: torch.dtype, exponent: int, device: str) -> None:
    """Numbers 2^k times as large give the same output, to which eps is nothing, and gradients 2^-k times as large."""
    case = case.but(shape=(3, 6, 9, 8), activation="silu" if case.has_activation else None)
    small = case.but(eps=0.0).tensors(dtype, device, layout)
    small[0] = small[0].clamp(-1.9, 1.9)
    if case.adds:
        small[3] = torch.zeros_like(small[3])
    huge = [small[0] * 2.0**exponent, *small[1:]]
    assert huge[0].isfinite().all()
    exact = [t if t is None else t.double() for t in small]
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    output, oracle = case.run(huge)[0].double(), case.but(eps=0.0).run_reference(exact)[0]
    torch.testing.assert_close(output, oracle, rtol=tolerance, atol=tolerance)
    grad_outputs = case.grad_outputs(dtype, device)
    grad_outputs[1:] = [torch.zeros_like(g) for g in grad_outputs[1:]]
    actual = case.gradients(huge, grad_outputs)
    expected = case.but(eps=0.0).gradients(exact, [g.double() for g in grad_outputs], reference=True)
    for i, (gradient, right) in enumerate(zip(actual, expected, strict=True)):
        scale = 2.0**exponent if i == 0 or (case.adds and i == len(actual) - 1) else 1.0
        error = (gradient.double() * scale - right).abs().max()
        assert error <= tolerance * 4 * right.abs().max(), i


@pytest.mark.parametrize("case", CENTERED, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("constant", [1e36, -3e38])
def test_huge_constants_give_exactly_the_bias(case: Case, layout: str, constant: float, device: str) -> None:
    case = case.but(shape=(4, 6, 7, 11), residual=False)
    tensors = case.tensors(torch.float32, device, layout)
    tensors[0] = torch.full_like(tensors[0], constant)
    if case.adds:
        tensors[3] = torch.zeros_like(tensors[3])
    bias = tensors[2] if case.normalises_rows and case.channels == "last" else tensors[2][:, None, None]
    torch.testing.assert_close(case.run(tensors)[0], bias.expand(case.shape), rtol=0, atol=0)


@pytest.mark.parametrize("case", [case for case in CENTERED if not case.normalises_rows], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradients_where_the_inverse_variance_overflows(case: Case, layout: str, device: str) -> None:
    case = case.but(shape=(3, 6, 9, 8), eps=0.0)
    tensors, grad_outputs = case.tensors(torch.float32, device, layout), case.grad_outputs(torch.float32, device)
    expected = case.gradients(
        [t if t is None else t.double() for t in tensors], [g.double() for g in grad_outputs], reference=True
    )
    actual = case.gradients([tensors[0] * 2.0**-66, *tensors[1:]], grad_outputs)
    torch.testing.assert_close(actual[0].double() * 2.0**-66, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", BY_OWN_STATISTICS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_half_values_whose_squares_overflow_their_type(case: Case, layout: str, device: str) -> None:
    tensors = case.but(shape=(2, 6, 9, 8)).tensors(torch.float16, device, layout)
    case = case.but(shape=(2, 6, 9, 8))
    tensors[0] = (tensors[0] * 5000).clamp(-60000, 60000)
    if case.adds:
        tensors[3] = torch.zeros_like(tensors[3])
    exact = [t if t is None else t.double() for t in tensors]
    torch.testing.assert_close(case.run(tensors)[0], case.run_reference(exact)[0].half(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_what_is_no_number_stays_in_its_group(case: Case, value: float, layout: str, device: str) -> None:
    """Where the reference has numbers there are numbers, and NaN where it has NaN."""
    case = case.but(shape=(3, 6, 5, 8))
    tensors = case.tensors(torch.float32, device, layout)
    tensors[0][1, 2, 3, 4] = value
    for actual, expected in zip(case.run(tensors), case.run_reference(tensors), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)
    grad_outputs = case.grad_outputs(torch.float32, device)
    actual_gradients = case.gradients(tensors, grad_outputs)
    expected_gradients = case.gradients(tensors, grad_outputs, reference=True)
    for name, actual, expected in zip(NAMES, actual_gradients, expected_gradients, strict=False):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations_of_special_values(activation: str | None, floating_dtype: torch.dtype, device: str) -> None:
    """Through a norm that changes nothing: statistics 0 and 1."""
    special = [0.0, -0.0, 1e-4, -1e-4, 3.0, -3.0, 2.99, -2.99, 9.0, -9.0, 40.0, -40.0, 6e4, -6e4]
    values = torch.tensor([*special, math.inf, -math.inf, math.nan], dtype=floating_dtype, device=device)
    zero, one = torch.zeros(1, dtype=floating_dtype, device=device), torch.ones(1, dtype=floating_dtype, device=device)
    case = Case("batch_norm", (values.numel(), 1), training=False, residual=False, activation=activation, eps=0.0)
    tensors = [values[:, None], one, zero, None, zero, one]
    exact = [t if t is None else t.double() for t in tensors]
    expected = case.run_reference(exact)[0].to(floating_dtype)
    torch.testing.assert_close(case.run(tensors)[0], expected, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_accuracy_of_activations(activation: str, device: str) -> None:
    """Every sign and size of argument, against float64."""
    values = torch.linspace(-12, 12, 20_001, device=device)
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    case = Case("batch_norm", (values.numel(), 1), training=False, residual=False, activation=activation, eps=0.0)
    tensors = [values[:, None], one, zero, None, zero, one]
    output = case.run(tensors)[0][:, 0].double()
    exact = values.double().requires_grad_()
    expected = activate(exact, activation, 0.2)
    error = (output - expected).abs()
    assert error.max() <= 2e-6
    assert (error / expected.abs())[expected.abs() > 1e-2].max() <= 1e-5
    slope = case.gradients(tensors, [torch.ones(values.numel(), 1, device=device)])[0][:, 0].double()
    expected_slope = torch.autograd.grad(expected.sum(), exact)[0]
    smooth = (values != 0) & (values.abs() != 3)
    assert (slope - expected_slope)[smooth].abs().max() <= 2e-6


# ---- bitwise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_bits(case: Case, layout: str, dtype: torch.dtype) -> None:
    tensors, grad_outputs = case.tensors(dtype, layout=layout), case.grad_outputs(dtype)
    results = []
    for count in (1, 2, 3):
        with num_threads(count):
            results.append([*case.run(tensors), *case.gradients(tensors, grad_outputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_are_bitwise_equal(case: Case, device: str) -> None:
    case = case.but(shape=(4, 9, 17, 19))
    tensors, grad_outputs = case.tensors(torch.float32, device), case.grad_outputs(torch.float32, device)
    first, second = ([*case.run(tensors), *case.gradients(tensors, grad_outputs)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- processes of their own, memory ----------------------------------------------------------------------------------


def test_every_instruction_set(instruction_set: str) -> None:
    run_python(
        f"""
import itertools, torch
from helpers import FLOATING_DTYPES
from norm_cases import ACTIVATIONS, CASES
assert torch.ops.myvision._cpu_capability().lower() == {instruction_set!r}
for case in CASES:
    activations = [None, *(ACTIVATIONS if case.has_activation else [])]
    for i, (activation, dtype) in enumerate(itertools.product(activations, FLOATING_DTYPES)):
        layout = ("contiguous", "channels_last", "sliced")[i % 3]  # each meets each type and activation
        case.but(shape=(3, 21, 5, 9), activation=activation).check(dtype, layout=layout)
""",
        instruction_set,
    )


KEPT = [
    (Case("batch_norm"), 3 * 6),
    (Case("batch_norm", training=False), 3 * 6),
    (Case("instance_norm"), 3 * 18),
    (Case("group_norm"), 3 * 9),
    (Case("layer_norm"), 3 * 90),
    (Case("layer_norm", channels="first"), 3 * 60),
    (Case("rms_norm"), 90),
    (Case("add_layer_norm"), 3 * 90),
    (Case("add_rms_norm"), 90),
]


@pytest.mark.parametrize(("case", "statistics"), KEPT, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_memory_kept_for_backward(case: Case, statistics: int, activation: str | None) -> None:
    """The input, or the sum, and the statistics; with an activation also the residual. Parameters live anyway."""
    if activation and not case.has_activation:
        pytest.skip("has none")
    case = case.but(activation=activation)
    tensors = [t if t is None else t.requires_grad_() for t in case.tensors()[:4]] + case.tensors()[4:]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = case.run(tensors)
    parameters = {t.untyped_storage().data_ptr() for t in (*tensors[1:3], *tensors[4:]) if t is not None}
    sizes = sorted(tensor.untyped_storage().nbytes() // 4 for at, tensor in kept.items() if at not in parameters)
    assert sizes == sorted([statistics, *[outputs[0].numel()] * (2 if activation else 1)])


@pytest.mark.parametrize("device", ["cpu", *EMULATORS], indirect=True)  # a GPU would have to own all of the storage
@pytest.mark.parametrize("case", CASES, ids=str)
def test_offsets_in_memory_past_32_bits(case: Case, device: str) -> None:
    """Images that lie more than 2^31 elements apart, in a storage of which little is ever touched."""
    case = case.but(shape=(2, 3, 4, 5))
    gap = 2**31 + 16
    tensors, grad_outputs = case.tensors(torch.bfloat16), case.grad_outputs(torch.bfloat16)
    far = list(tensors)
    for i in (0, 3):
        storage = torch.empty(gap + 60, dtype=torch.bfloat16)
        far[i] = storage.as_strided(case.shape, (gap, 20, 5, 1)).copy_(tensors[i])
    torch.testing.assert_close(case.run(far), case.run(tensors))
    torch.testing.assert_close(case.gradients(far, grad_outputs), case.gradients(tensors, grad_outputs))


def test_more_than_two_to_the_31_elements(real_device: str) -> None:
    """An expanded input keeps it at one tensor of 4 GiB: its rows are alike."""
    row = random_tensor(1024, dtype=torch.bfloat16, device=real_device)
    rows = 2**21 + 3
    output = rms_norm(row.expand(rows, 1024), (1024,))
    assert output.numel() > 2**31
    expected = rms_norm(row, (1024,))
    for index in (0, rows // 2, rows - 1):
        assert torch.equal(output[index], expected)
