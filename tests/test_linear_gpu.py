"""linear over torch's products: the GPU's kernels around them, and the same way on the CPU where it is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from emulation import EMULATORS
from helpers import FLOATING_DTYPES, available_instruction_sets, random_tensor, run_python, with_layout
from linear_cases import SEED, SLOPE, Case
from norm_cases import ACTIVATIONS
from torch import Tensor

from myvision._formulas._dropout import keep_mask

GPUS = pytest.mark.parametrize("device", [*EMULATORS, "cuda"], indirect=True)
SIZES = [(1, 1), (1, 7), (3, 8), (5, 16), (7, 9), (2, 31), (9, 64), (64, 1)]  # of rows and outputs
LONG = Case((3,), 2, 6000, dropout_p=0.3, activation="silu")  # a grid of the emulator walks over it several times


def with_gap(tensor: Tensor, columns: int) -> Tensor:
    """The same matrix with so many columns between its rows that are none of it."""
    return F.pad(tensor, (0, columns))[..., : tensor.shape[-1]]


# ---- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@GPUS
def test_any_size(
    size: tuple[int, int], activation: str | None, dropout_p: float, floating_dtype: torch.dtype, device: str
) -> None:
    """Around packs of 2, 4 and 8 elements, and around the four that share what is drawn for dropout."""
    rows, outputs = size
    Case((rows,), 3, outputs, activation=activation, dropout_p=dropout_p).check(floating_dtype, device)


@pytest.mark.parametrize("outputs", [15, 16])
@pytest.mark.parametrize("layout", ["permuted", "sliced", "offset", "gap of 1", "gap of 8", "row", "number"])
@GPUS
def test_matrices_beside_the_product(layout: str, outputs: int, floating_dtype: torch.dtype, device: str) -> None:
    """However residual and the gradient of the output lie, the bits are those of contiguous ones."""

    def laid_out(tensor: Tensor) -> Tensor:
        if layout.startswith("gap"):
            return with_gap(tensor, int(layout.split()[-1]))
        if layout == "row":
            return tensor[:1].expand(tensor.shape)
        return tensor[0, 0].expand(tensor.shape) if layout == "number" else with_layout(tensor, layout)

    case = Case((9,), 3, outputs, activation="gelu", dropout_p=0.4)
    *tensors, residual = case.tensors(floating_dtype, device)
    residual, grad_output = laid_out(residual), laid_out(case.grad_output(floating_dtype, device))
    actual = case.results(case.run, [*tensors, residual], grad_output)
    expected = case.results(case.run, [*tensors, residual.contiguous()], grad_output.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("grad_layout", ["contiguous", "offset", "sliced"])
@GPUS
def test_more_than_a_grid(grad_layout: str, floating_dtype: torch.dtype, device: str) -> None:
    LONG.check(floating_dtype, device, grad_layout=grad_layout)


@GPUS
def test_a_preactivation_that_is_not_aligned(floating_dtype: torch.dtype, device: str) -> None:
    input, weight, preactivation, grad = (
        random_tensor(*shape, dtype=floating_dtype, device=device, seed=i)
        for i, shape in enumerate([(5, 3), (16, 3), (5, 16), (5, 16)])
    )
    seed = torch.tensor(SEED, device=device)

    def gradients(preactivation: Tensor) -> tuple[Tensor, ...]:
        options = "gelu", SLOPE, 0.3, seed, [True, True, True]
        return torch.ops.myvision._linear_backward(grad, input, weight, None, preactivation, *options)

    unaligned = with_layout(preactivation, "offset")
    assert unaligned.data_ptr() % 16 != 0
    for actual, expected in zip(gradients(unaligned), gradients(preactivation), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape", [(6000,), (7, 33), (5, 16)], ids=str)
@GPUS
def test_dropout_is_the_cpus(shape: tuple[int, ...], floating_dtype: torch.dtype, device: str) -> None:
    """Element by element, forward and backward."""
    ones = torch.ones(*shape[:-1], 1, dtype=floating_dtype, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], 1, dtype=floating_dtype, device=device)
    seed = torch.tensor(SEED, device=device)
    output = torch.ops.myvision.linear(ones, weight, None, None, 0.0, 0.4, seed, None)
    keep = keep_mask(torch.empty(shape), 0.4, seed.cpu())
    assert torch.equal(output != 0, keep.bool().to(device))
    for i in (0, shape[-1] - 1):
        grad_output = torch.zeros_like(output)
        grad_output[..., i] = 1
        (gradient,) = torch.autograd.grad(output, ones, grad_output, retain_graph=True)
        assert torch.equal(gradient[..., 0], output[..., i])


@pytest.mark.parametrize("case", [Case(residual=False), Case(activation="relu"), Case((5,))], ids=str)
@pytest.mark.parametrize("keeps", [False, True])
@GPUS
def test_results_may_be_changed_in_place(case: Case, keeps: bool, device: str) -> None:
    """They are no views of the product that they were made of."""
    tensors = case.tensors(device=device)
    tensors[0].requires_grad_(keeps)
    output = case.run(tensors)
    assert not output._is_view()
    changed = output.mul_(torch.ones((), device=device, requires_grad=True))
    torch.testing.assert_close(changed, case.run(tensors))
    changed.sum().backward()


# ---- torch's products on the CPU -------------------------------------------------------------------------------------

CHECKS = """
import torch
from helpers import FLOATING_DTYPES
from linear_cases import LAYOUTS, Case
from torch.profiler import profile
cases = [Case((0,)), Case(outputs=0, activation="relu"), Case(features=0), Case((2, 0), dropout_p=0.5)]
for case, dtype in zip(cases, FLOATING_DTYPES):
    case.check(dtype)
large = Case((2, 50), 33, 200, activation="gelu", dropout_p=0.5)
for layout in LAYOUTS:
    large.check(torch.float32, layout=layout, grad_layout=layout)
with profile() as events:
    large.results(large.run, large.tensors(), large.grad_output())
calls = [event for event in events.events() if event.name.startswith("myvision::")]
print(sorted({child.name for call in calls for child in call.cpu_children} & {"aten::linear", "aten::matmul"}))
print(*[torch.ops.myvision._product_choice(dtype) for dtype in FLOATING_DTYPES])
"""


@pytest.mark.parametrize(("product", "called"), [("torch", "['aten::linear', 'aten::matmul']"), ("own", "[]")])
def test_the_environment_chooses_the_product(product: str, called: str) -> None:
    """Both give what the formula gives, forward and backward."""
    children, choices = run_python(CHECKS, MYVISION_PRODUCT=product).splitlines()
    assert children == called
    assert choices.count(f"(MYVISION_PRODUCT={product})") == len(FLOATING_DTYPES)


def test_another_value_of_the_variable_is_an_error() -> None:
    code = """
import torch, myvision
from myvision import __main__
try:
    myvision.ops.linear(torch.ones(2, 3), torch.ones(4, 3))
except RuntimeError as error:
    print(error)
__main__.main(["env"])
"""
    message = "MYVISION_PRODUCT must be 'own' or 'torch', but is 'mkl'"
    output = run_python(code, MYVISION_PRODUCT="mkl")
    assert output.count(message) == 1 + len(FLOATING_DTYPES)


@pytest.mark.parametrize("limit", ["avx2", "avx512"])
@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="Linux lists the CPU's features")
def test_torchs_product_is_taken_where_it_is_faster(limit: str) -> None:
    """That is with AMX for the type, or on Intel's CPUs, and not where ATEN_CPU_CAPABILITY leaves these out."""
    features = Path("/proc/cpuinfo").read_text().split()
    best = limit == "avx512" == available_instruction_sets()[-1]
    code = "import torch; print(torch.ops.myvision._product_choice(torch.{}).split()[0])"
    for dtype, feature in {"bfloat16": "amx_bf16", "float16": "amx_fp16", "float32": "GenuineIntel"}.items():
        chosen = run_python(code.format(dtype), limit, MYVISION_PRODUCT="").strip()
        assert chosen == ("torch's" if best and feature in features else "myvision's"), dtype
