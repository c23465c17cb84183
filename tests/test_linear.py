"""linear: values and gradients of every type, layout and size; dropout; bits, threads, instruction sets and memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import num_threads, random_tensor, run_python
from linear_cases import CASES, LARGE, LAYOUTS, NAMES, PLAIN, SEED, Case
from norm_cases import ACTIVATIONS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from myvision._formulas._activation import activate
from myvision._formulas._dropout import keep_mask
from myvision.ops import linear

SIZES = [1, 3, 8, 16, 17, 33, 100]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(case: Case, layout: str, floating_dtype: torch.dtype, device: str) -> None:
    case.check(floating_dtype, device, layout)


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_layouts_of_the_gradient(grad_layout: str, activation: str | None, device: str) -> None:
    PLAIN.but(activation=activation).check(torch.float32, device, grad_layout=grad_layout)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("features", SIZES)
@pytest.mark.parametrize("outputs", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sizes(rows: int, features: int, outputs: int, dtype: torch.dtype, device: str) -> None:
    Case((rows,), features, outputs, activation="gelu").check(dtype, device)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", [LARGE, LARGE.but(activation=None, dropout_p=0.0), Case((1,), 1030, 515)], ids=str)
def test_larger_than_a_block(case: Case, transposed: bool, floating_dtype: torch.dtype, real_device: str) -> None:
    case.check(floating_dtype, real_device, "permuted" if transposed else "contiguous")


@pytest.mark.parametrize("rows", [(), (1,), (4,), (1, 1), (1, 4), (4, 1), (2, 3), (2, 1, 3), (2, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_dimensions(rows: tuple[int, ...], layout: str, device: str) -> None:
    PLAIN.but(rows=rows, activation="relu").check(torch.float32, device, layout)


@pytest.mark.parametrize("case", [case for case in CASES if not case.dropout_p], ids=str)
def test_is_torchs_function(case: Case, real_device: str) -> None:
    tensors = case.tensors(device=real_device)
    torch.testing.assert_close(case.run(tensors), case.run_torch(tensors))


@pytest.mark.parametrize("layouts", [("contiguous", "permuted"), ("sliced", "contiguous"), ("gaps", "sliced")], ids=str)
def test_input_weight_and_residual_lie_differently(layouts: tuple[str, str], device: str) -> None:
    case = PLAIN.but(activation="hardswish")
    tensors, grad_output = case.tensors(device=device), case.grad_output(device=device)
    others = [case.tensors(device=device, layout=layout) for layout in layouts]
    expected = case.results(case.run, tensors, grad_output)
    for i in (0, 1, 3):
        mixed = [others[0][j] if j == i else others[1][j] for j in range(4)]
        torch.testing.assert_close(case.results(case.run, mixed, grad_output), expected)


@pytest.mark.parametrize("case", [PLAIN.but(activation="relu"), Case((4,)), Case(dropout_p=0.5)], ids=str)
@pytest.mark.parametrize("empty", [{"rows": (0,)}, {"rows": (2, 0, 3)}, {"outputs": 0}, {"features": 0}], ids=str)
def test_empty_sizes(case: Case, empty: dict[str, object], floating_dtype: torch.dtype, device: str) -> None:
    """No features give the bias, and no rows gradients of zero."""
    case.but(**empty).check(floating_dtype, device)


def test_everything_empty(device: str) -> None:
    Case((0,), 0, 0, activation="silu").check(torch.float32, device)


# ---- what is no number, and activations ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [PLAIN, PLAIN.but(activation="relu"), PLAIN.but(activation="gelu")], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_stays_where_it_is(case: Case, value: float, name: str, device: str) -> None:
    """Where the formula has numbers there are numbers, and NaN where it has NaN."""
    tensors, grad_output = case.tensors(device=device), case.grad_output(device=device)
    tensors[NAMES.index(name)].view(-1)[4] = value
    actual = case.results(case.run, tensors, grad_output)
    exact = [t.double() for t in tensors]
    expected = [t.float() for t in case.results(case.run_formula, exact, grad_output.double())]
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations_of_special_values(activation: str | None, floating_dtype: torch.dtype, device: str) -> None:
    special = [0.0, -0.0, 1e-4, -1e-4, 3.0, -3.0, 2.99, -2.99, 9.0, -9.0, 40.0, -40.0, 6e4, -6e4]
    values = torch.tensor([*special, math.inf, -math.inf, math.nan], dtype=floating_dtype, device=device)
    case = Case((values.numel(),), 1, 1, bias=False, residual=False, activation=activation)
    tensors = [values[:, None], torch.ones(1, 1, dtype=floating_dtype, device=device), None, None]
    expected = case.run_formula([t if t is None else t.double() for t in tensors]).to(floating_dtype)
    torch.testing.assert_close(case.run(tensors), expected, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_accuracy_of_activations(activation: str, device: str) -> None:
    """Every sign and size of argument, against float64."""
    values = torch.linspace(-12, 12, 20_001, device=device)
    case = Case((values.numel(),), 1, 1, bias=False, residual=False, activation=activation)
    tensors = [values[:, None], torch.ones(1, 1, device=device), None, None]
    output, slope, _ = (t.double() for t in case.results(case.run, tensors, torch.ones_like(tensors[0])))
    exact = values.double().requires_grad_()
    expected = activate(exact, activation, 0.2)
    error = (output[:, 0] - expected).abs()
    assert error.max() <= 2e-6
    assert (error / expected.abs())[expected.abs() > 1e-2].max() <= 1e-5
    expected_slope = torch.autograd.grad(expected.sum(), exact)[0]
    smooth = (values != 0) & (values.abs() != 3)
    assert (slope[:, 0] - expected_slope)[smooth].abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_types_are_taken_in_float(dtype: torch.dtype, device: str) -> None:
    """Of 5000 ones, which a half type stops counting at 2048 or 256, and whose products reach float16's end."""
    input, weight = torch.ones(2, 5000, dtype=dtype, device=device), torch.ones(3, 5000, dtype=dtype, device=device)
    torch.testing.assert_close(linear(input, weight), torch.full((2, 3), 5000, dtype=dtype, device=device))
    weight[:, ::2] = -1
    assert not linear(input * 60000, weight).any()


# ---- dropout ---------------------------------------------------------------------------------------------------------


def kept(shape: tuple[int, ...], p: float, **options: object) -> Tensor:
    """Which ones of ones came through."""
    ones = torch.ones(*shape, 1, **options)
    return linear(ones, torch.ones(33, 1, **options), dropout_p=p) != 0


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (9, 1), (1, 1031)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_mask_is_that_of_the_reference(
    seed: int, shape: tuple[int, ...], p: float, dtype: torch.dtype, device: str
) -> None:
    input = torch.ones(*shape[:-1], 2, dtype=dtype, device=device)
    weight = torch.ones(shape[-1], 2, dtype=dtype, device=device)
    tensor = torch.tensor(seed, device=device)
    output = torch.ops.myvision.linear(input, weight, None, None, 0.0, p, tensor, None)
    keep = keep_mask(output, p, tensor)
    torch.testing.assert_close(output, (2 / (1 - p) * keep).to(dtype))


def test_dropout_keeps_as_many_as_it_should_in_every_row_and_column(device: str) -> None:
    p, mask = 0.3, kept((600,), 0.3, device=device).double()
    assert abs(mask.mean().item() - (1 - p)) < 5 * (p * (1 - p) / mask.numel()) ** 0.5
    for dim in (0, 1):
        means = mask.mean(dim)
        assert (means - (1 - p)).abs().max() < 6 * (p * (1 - p) / mask.shape[dim]) ** 0.5


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_dropout_of_everything_leaves_the_residual(activation: str | None, device: str) -> None:
    case = PLAIN.but(activation=activation, dropout_p=1.0)
    tensors, grad_output = case.tensors(device=device), case.grad_output(device=device)
    output, *gradients, residual = case.results(case.run, tensors, grad_output)
    assert torch.equal(output, tensors[3])
    assert torch.equal(residual, grad_output)
    assert not any(gradient.any() for gradient in gradients)


def test_nothing_is_drawn_where_nothing_is_dropped(real_device: str) -> None:
    state = torch.get_rng_state()
    PLAIN.run(PLAIN.tensors(device=real_device))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_seed_of_torch_reproduces_it(device: str) -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append([kept((7,), 0.5, device=device) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
    assert not torch.equal(masks[0][0], masks[0][1]), "each call has a mask of its own"
    assert not torch.equal(masks[0][0], masks[2][0])


def test_the_mask_does_not_depend_on_threads_and_type() -> None:
    masks = []
    for count in (1, 2, 3):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            torch.manual_seed(3)
            with num_threads(count):
                masks.append(kept((3, 101), 0.5, dtype=dtype))
    assert all(torch.equal(masks[0], mask) for mask in masks)


def test_dropout_under_checkpointing() -> None:
    """The forward pass that runs again drops the same elements."""
    input, weight = (random_tensor(*shape, seed=8).requires_grad_() for shape in ((9, 5), (33, 5)))

    def gradients(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(5)
        call: Callable[..., Tensor] = lambda *args: linear(*args, activation="silu", dropout_p=0.5)  # noqa: E731
        output = checkpoint(call, input, weight, use_reentrant=False) if checkpointed else call(input, weight)
        return list(torch.autograd.grad(output.square().sum(), [input, weight]))

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


# ---- bitwise ---------------------------------------------------------------------------------------------------------


def test_threads_do_not_change_bits() -> None:
    """Of our own products; torch's make no such promise."""
    run_python(
        """
import torch
from helpers import num_threads
from linear_cases import LARGE, Case
for case in (LARGE, LARGE.but(rows=(1,)), Case((40,), 1500, 20), Case((1500,), 20, 3), Case((3072,), 16, 24)):
    for dtype in (torch.float32, torch.bfloat16):
        tensors, grad_output = case.tensors(dtype), case.grad_output(dtype)
        results = []
        for count in (1, 2, 3, 8):
            with num_threads(count):
                results.append(case.results(case.run, tensors, grad_output))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), (case, dtype)
""",
        MYVISION_PRODUCT="own",
    )


# Rows, outputs and features: several blocks of rows and groups of columns; the depth in two parts where one thread has
# memory for them; few columns for many threads; an output that is written past the caches.
BLOCKED = [(1300, 1100, 40), (620, 70, 24000), (40, 1100, 700), (4200, 1024, 8)]


@pytest.mark.parametrize("capability", ["avx512", "avx2", "default"])
def test_blocked_products(capability: str) -> None:
    """Sizes that need every kind of block, against float64, and bit for bit the same on any number of threads."""
    run_python(
        f"""
import torch
from helpers import num_threads, random_tensor
from myvision.ops import linear

def gradients(tensors, dtype):
    input, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    output = linear(input, weight, bias, activation="gelu")
    return output, *torch.autograd.grad(output.sum() + output.square().sum(), (input, weight, bias))

for rows, outputs, features in {BLOCKED}:
    shapes = ((rows, features), (outputs, features), (outputs,))
    tensors = [random_tensor(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    tensors[1] /= features**0.5
    wanted = gradients(tensors, torch.float64)
    results = []
    for count in (1, 2, 8):
        with num_threads(count):
            results.append(gradients(tensors, torch.float32))
    for result, exact in zip(results[0], wanted, strict=True):
        assert (result - exact).abs().max() < 1e-5 * exact.abs().max(), (rows, outputs, features)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), (rows, outputs, features)
""",
        instruction_set=capability,
        MYVISION_PRODUCT="own",
    )


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_runs_and_modes_are_bitwise_equal(activation: str | None, device: str) -> None:
    """What is kept for backward changes nothing."""
    case = PLAIN.but(activation=activation, dropout_p=0.3)
    tensors, grad_output = case.tensors(device=device), case.grad_output(device=device)
    first, second = (case.results(case.run, tensors, grad_output) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(case.run(tensors), first[0])


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_no_gradient_needs_may_change(frozen: str, device: str) -> None:
    """As with torch's: of a layer without activation, the gradient of one factor asks for the other alone."""
    tensors = {
        "input": random_tensor(5, 7, seed=1, device=device),
        "weight": random_tensor(3, 7, seed=2, device=device),
    }
    trained = next(tensor for name, tensor in tensors.items() if name != frozen).requires_grad_()
    gradients = []
    for function in (linear, F.linear):
        factors = {name: tensor * 1 for name, tensor in tensors.items()}
        output = function(**factors)
        with torch.no_grad():
            next(factor for name, factor in factors.items() if name != frozen).add_(1)
        gradients += torch.autograd.grad(output.sum(), trained)
    torch.testing.assert_close(*gradients)


# ---- what runs and what is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_kept_for_backward(case: Case, real_device: str) -> None:
    """The input, and the preactivation where there is an activation. Parameters live anyway, and no mask is kept."""
    tensors = [t if t is None else t.requires_grad_() for t in case.tensors(device=real_device)]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        case.run(tensors)
    given = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    more = sum(tensor.numel() for pointer, tensor in kept.items() if pointer not in given)
    assert more == (math.prod(case.output_shape) if case.activation else 0) + (1 if case.dropout_p else 0)
    assert tensors[3] is None or tensors[3].data_ptr() not in kept


@pytest.mark.parametrize("case", [PLAIN, PLAIN.but(activation="silu")], ids=str)
@pytest.mark.parametrize("wanted", [[name] for name in NAMES] + [["input", "residual"], ["weight", "bias"]], ids=str)
def test_only_needed_gradients_are_computed(case: Case, wanted: list[str], device: str) -> None:
    tensors, grad_output = case.tensors(device=device), case.grad_output(device=device)
    all_gradients = dict(zip(NAMES, case.results(case.run, tensors, grad_output)[1:], strict=True))
    for name in wanted:
        tensors[NAMES.index(name)].requires_grad_()
    returned = case.run(tensors).grad_fn.apply(grad_output)
    gradients = dict(zip(["input", "weight", "bias", *[None] * 4, "residual"], returned, strict=True))
    assert [name for name in NAMES if gradients[name] is not None] == wanted
    for name in wanted:
        torch.testing.assert_close(gradients[name], all_gradients[name])


CHECK_ALL = """
import itertools
from helpers import FLOATING_DTYPES
from linear_cases import CASES, LAYOUTS, Case
layouts = itertools.cycle(LAYOUTS)
for case, dtype in itertools.product([*CASES, Case((37,), 70, 65), Case((1,), 33, 200)], FLOATING_DTYPES):
    case.check(dtype, layout=next(layouts))
"""


def test_every_instruction_set(instruction_set: str) -> None:
    run_python(CHECK_ALL, instruction_set, MYVISION_PRODUCT="own")


def test_torchs_product() -> None:
    """Which the operator takes where it is faster, or where it is told to."""
    run_python(CHECK_ALL, MYVISION_PRODUCT="torch")


# ---- nested tensors --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    components = [random_tensor(length, 4, 6, seed=length) for length in (2, 5, 3)]
    weight, bias = random_tensor(7, 6, seed=8).requires_grad_(), random_tensor(7, seed=9).requires_grad_()
    input = torch.nested.as_nested_tensor(components, layout=layout)
    output = linear(input, weight, bias, activation="silu")
    expected = [linear(t, weight, bias, activation="silu") for t in components]
    assert output.layout == layout
    torch.testing.assert_close(output.unbind(), tuple(expected))
    if layout == torch.jagged:
        torch.testing.assert_close(F.silu(F.linear(input, weight, bias)).unbind(), tuple(expected))
    added = linear(output, weight.detach().t(), residual=input)
    torch.testing.assert_close(
        added.unbind(),
        tuple(linear(y, weight.detach().t(), residual=x) for x, y in zip(components, expected, strict=True)),
    )
    losses = [torch.stack([t.square().sum() for t in tensors]).sum() for tensors in (output.unbind(), expected)]
    gradients = [torch.autograd.grad(loss, [weight, bias]) for loss in losses]
    torch.testing.assert_close(*gradients)
    with pytest.raises(RuntimeError, match="linear: residual must be a nested tensor"):
        linear(input, weight, residual=random_tensor(10, 4, 7))
    with pytest.raises(RuntimeError, match="linear: weight must be a dense tensor, but is a nested one"):
        linear(components[0], input)


def test_the_formula_counts_dropout_as_torch_does() -> None:
    """The oracle by itself: with probability p nothing, the rest scaled."""
    output = Case((2000,), 1, 3, bias=False, residual=False, dropout_p=0.25)
    ones = [torch.ones(2000, 1, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64), None, None]
    values, counts = output.run_formula(ones).unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0, 1 / 0.75], dtype=torch.float64))
    assert abs(counts[0].item() / 6000 - 0.25) < 0.03
    assert SEED > 2**32, "both words of the key count"
