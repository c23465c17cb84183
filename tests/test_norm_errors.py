"""The norms: bad input is told, in eager mode and in fake mode alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_cases import CASES, Case
from torch import Tensor
from torch._subclasses import FakeTensorMode

SHAPE = (3, 6, 5, 4)
RUNNING = [case for case in CASES if case.op in ("batch_norm", "instance_norm") and not case.training]
IMAGES = [case for case in CASES if not case.normalises_rows]
NOT_ADDING = [case for case in CASES if not case.adds]


def replaced(position: int, change: Callable[[Tensor], Any]) -> Callable[[list[Tensor | None]], list[Any]]:
    """Changes one of input, weight, bias, residual, running_mean and running_var."""
    return lambda tensors: [change(t) if i == position and t is not None else t for i, t in enumerate(tensors)]


def is_given(case: Case, position: int) -> bool:
    return case.tensors()[position] is not None


PARAMETERS = {1: "weight", 2: "bias", 4: "running_mean", 5: "running_var"}
TENSORS = {0: "input", 3: "residual", **PARAMETERS}


def size_message(name: str, of_channels: bool) -> str:
    if of_channels:
        return rf"input must have 7 channels, as {name} has, but has shape \(3, 6, 5, 4\)"
    return rf"{name} must have shape \(.*\), but has shape"


# What is wrong -> (the cases it applies to, what is done to the tensors, what the message says)
BAD: dict[str, tuple[list[Case], Callable[[list[Tensor | None]], list[Any]], str]] = {
    "integer input": (CASES, replaced(0, Tensor.long), "input must have dtype float64, .* but has int64"),
    "complex input": (CASES, replaced(0, lambda t: t + 0j), "input must have dtype float64, .* but has complex64"),
    "input of a type of 8 bits": (
        CASES,
        replaced(0, lambda t: t.to(torch.float8_e4m3fn)),
        "input must have dtype float64, .* but has float8_e4m3fn",
    ),
    "bool input": (CASES, replaced(0, lambda t: t > 0), "input must have dtype float64, .* but has bool"),
    "input of one dimension": (IMAGES, replaced(0, lambda t: t[0, :, 0, 0]), "input must have at least 2 dimensions"),
    "input without dimensions": (IMAGES, replaced(0, torch.sum), "input must have at least 2 dimensions"),
    "residual of another shape": (CASES, replaced(3, lambda t: t[:1]), "residual must have the shape of input"),
    "residual of another rank": (CASES, replaced(3, lambda t: t[0]), "residual must have the shape of input"),
    "residual of another dtype": (
        CASES,
        replaced(3, Tensor.double),
        "residual must have the dtype of input, float32, but has float64",
    ),
    **{
        f"{name} of another {'number of channels' if of_channels else 'size'}": (
            [case for case in CASES if is_given(case, i) and case.normalises_rows != of_channels],
            replaced(i, lambda t: t.new_ones([size + 1 for size in t.shape])),
            size_message(name, of_channels),
        )
        for i, name in PARAMETERS.items()
        for of_channels in (False, True)
    },
    **{
        f"{name} of another rank": (
            [case for case in CASES if is_given(case, i)],
            replaced(i, lambda t: t[None]),
            rf"{name} must have shape \(.*\), but has shape",
        )
        for i, name in PARAMETERS.items()
    },
    **{
        f"integer {name}": (
            [case for case in CASES if is_given(case, i)],
            replaced(i, Tensor.int),
            f"{name} must have dtype float64, float32, float16 or bfloat16, but has int32",
        )
        for i, name in PARAMETERS.items()
    },
    **{
        f"a list as {name}": (
            [case for case in CASES if is_given(case, i)],
            replaced(i, Tensor.tolist),
            f"{name} must be a tensor, but got list",
        )
        for i, name in TENSORS.items()
    },
    "no input": (CASES, lambda tensors: [None, *tensors[1:]], "input must be a tensor, but got NoneType"),
    "no residual to add": (
        [case for case in CASES if case.adds],
        lambda tensors: [*tensors[:3], None, *tensors[4:]],
        "residual must be a tensor, but got NoneType",
    ),
    **{
        f"{groups} groups": (
            [case.but(groups=groups) for case in CASES if case.op == "group_norm"],
            list,
            rf"num_groups must be a divisor of the number of channels, 6, but is {groups}",
        )
        for groups in (4, 0, -1)
    },
    "groups that are no number": (
        [case.but(groups="3") for case in CASES if case.op == "group_norm"],
        list,
        "num_groups must be an integer, but got str",
    ),
}
CALLS = [(name, case) for name, (cases, _, _) in BAD.items() for case in cases]


def says(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(("name", "case"), CALLS, ids=str)
def test_bad_input_raises_in_eager_and_fake_alike(name: str, case: Case, real_device: str) -> None:
    _, change, pattern = BAD[name]
    tensors = change(case.tensors(device=real_device))
    eager = says(lambda: case.run(tensors))
    assert re.search(pattern, eager), eager
    assert eager.startswith(f"{case.op}: ")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in tensors]
        assert says(lambda: case.run(fakes)) == eager
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert says(lambda: case.run(tensors)) == eager


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("position", range(1, 6))
def test_another_device(case: Case, position: int) -> None:
    tensors = case.tensors()
    if tensors[position] is None:
        pytest.skip("has none")
    tensors[position] = tensors[position].to("meta")
    name = {**PARAMETERS, 3: "residual"}[position]
    with pytest.raises(RuntimeError, match=f"{name} must be on the device of input, cpu, but is on meta"):
        case.run(tensors)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_eps_of_batch_norm(training: bool, device: str) -> None:
    """Which torch's own function refuses too, and only there."""
    case = Case("batch_norm", training=False)
    tensors = [None if t is None else t.to(device) for t in case.tensors()]
    for eps in (-1e-5, float("nan")):
        with pytest.raises(RuntimeError, match=f"batch_norm: eps must be at least 0, but is {eps:g}"):
            case.but(eps=eps, training=training).run(tensors)


@pytest.mark.parametrize("case", [case for case in CASES if case.op != "batch_norm"], ids=str)
def test_a_negative_eps(case: Case, real_device: str) -> None:
    case.but(eps=-1e-2).check(torch.float32, real_device)
    assert case.but(eps=-1e6).run(case.tensors(device=real_device))[0].isnan().all()


@pytest.mark.parametrize("case", RUNNING, ids=str)
@pytest.mark.parametrize("position", [4, 5])
def test_updated_statistics_that_are_expanded(case: Case, position: int, real_device: str) -> None:
    """Their elements share memory. Where they are only read that is no fault."""
    tensors = case.tensors(device=real_device)
    tensors[position] = tensors[position][:1].expand(6)
    eager = says(lambda: case.but(training=True).run(tensors))
    assert eager == (
        f"{case.op}: {PARAMETERS[position]} must have a place of its own for each channel, as it is updated, but is "
        "expanded"
    )
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in tensors]
        assert says(lambda: case.but(training=True).run(fakes)) == eager
    torch.testing.assert_close(case.run(tensors), case.run_reference(tensors))


@pytest.mark.parametrize("case", RUNNING, ids=str)
@pytest.mark.parametrize("wrong", ["expanded", "requires_grad", "residual", "weight"])
def test_a_call_that_fails_leaves_the_statistics(case: Case, wrong: str, real_device: str) -> None:
    input, weight, bias, residual, mean, var = case.tensors(device=real_device)
    if wrong == "expanded":
        var = var[:1].expand(6)
    elif wrong == "requires_grad":
        var.requires_grad_()
    elif wrong == "residual":
        residual = residual[:1]
    else:
        weight = weight[:5]
    before = mean.clone(), var.detach().clone(), mean._version
    with pytest.raises(RuntimeError):
        case.but(training=True).run([input, weight, bias, residual, mean, var])
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    assert mean._version == before[2]


@pytest.mark.parametrize("case", [case for case in CASES if not case.normalises_rows or case.adds], ids=str)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused(case: Case, layout: torch.layout) -> None:
    tensors = case.tensors()
    tensors[0] = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(5, 6)], layout=layout)
    with pytest.raises(RuntimeError, match=f"^{case.op}: input must be a dense tensor, but is a nested one"):
        case.run(tensors)


@pytest.mark.parametrize("case", NOT_ADDING, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("activation", ["tanh", "ReLU", ""])
def test_unknown_activations(case: Case, device: str, activation: str) -> None:
    tensors = [None if t is None else t.to(device) for t in case.tensors()]
    message = f"{case.op}: activation must be one of None, 'relu', .*'hardswish', but is '{activation}'"
    with pytest.raises(RuntimeError, match=message):
        case.but(activation=activation).run(tensors)


@pytest.mark.parametrize("case", RUNNING, ids=str)
@pytest.mark.parametrize("position", [4, 5])
def test_one_running_statistic_alone(case: Case, position: int) -> None:
    tensors = case.tensors()
    tensors[position] = None
    for training in (False, True):
        for device in ("cpu", "meta"):
            moved = [None if t is None else t.to(device) for t in tensors]
            with pytest.raises(RuntimeError, match=f"{case.op}: .*running_mean and running_var"):
                case.but(training=training).run(moved)


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_running_statistics_have_no_gradient(case: Case) -> None:
    for position in (4, 5):
        tensors = case.tensors()
        tensors[position].requires_grad_()
        with pytest.raises(RuntimeError, match="running_mean and running_var have no gradient"):
            case.run(tensors)
        with pytest.raises(RuntimeError, match=f"{case.op}: {PARAMETERS[position]} is updated, and so cannot require"):
            case.but(training=True).run(tensors)


# ---- the operators themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.training and not case.normalises_rows], ids=str)
def test_one_value_per_mean_reaches_the_check(case: Case) -> None:
    shape = {"batch_norm": (1, 6, 1), "instance_norm": (3, 6, 1), "group_norm": (1, 6, 1)}[case.op]
    case = case.but(shape=shape, groups=6)
    for device in ("cpu", "meta"):
        tensors = [None if t is None else t.to(device) for t in case.tensors()]
        with pytest.raises(RuntimeError, match=f"{case.op}: a mean needs more than 1 value, but input has shape"):
            getattr(torch.ops.myvision, case.op)(*case.arguments(tensors))


STATISTICS = {
    "of another size": lambda t: t[:, :-1].contiguous(),
    "of another dtype": Tensor.double,
    "not contiguous": lambda t: torch.stack([t, t], -1)[..., 0],
    "of another rank": lambda t: t.flatten(),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_statistics_of_backward(name: str, device: str) -> None:
    x = torch.ones(3, 6, 5, device=device)
    statistics = STATISTICS[name](torch.ones(3, 6, device=device))
    with pytest.raises(RuntimeError, match="batch_norm: statistics must be contiguous float32 of shape"):
        torch.ops.myvision._batch_norm_backward(
            x, x, statistics, None, None, None, 0, True, 1e-5, None, 0.0, [True, False, False, False]
        )
    statistics = STATISTICS[name](torch.ones(3, 18, device=device))
    with pytest.raises(RuntimeError, match="layer_norm: statistics must be contiguous float32 of shape"):
        torch.ops.myvision._layer_norm_backward(
            x, x, statistics, [5], None, None, None, False, 1e-5, None, 0.0, [True, False, False, False]
        )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_masks_of_another_length(device: str) -> None:
    x, statistics = torch.ones(3, 6, 5, device=device), torch.ones(3, 6, device=device)
    with pytest.raises(RuntimeError, match=r"output_mask|expected"):
        torch.ops.myvision._batch_norm_backward(
            x, x, statistics, None, None, None, 0, True, 1e-5, None, 0.0, [True, False]
        )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_of_another_shape(device: str) -> None:
    x, statistics = torch.ones(3, 6, 5, device=device), torch.ones(3, 6, device=device)
    with pytest.raises(RuntimeError, match="batch_norm: grad_output must have the shape of input"):
        torch.ops.myvision._batch_norm_backward(
            x[:, :, 0], x, statistics, None, None, None, 0, True, 1e-5, None, 0.0, [True, False, False, False]
        )


@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_seeds(op: str, device: str) -> None:
    x = torch.ones(2, 3, device=device)
    parameters = (None, None) if op == "add_layer_norm" else (None,)
    operator = getattr(torch.ops.myvision, op)
    with pytest.raises(RuntimeError, match=f"{op}: dropout needs a seed, but seed is None"):
        operator(x, x, [3], *parameters, 1e-5, 0.5, None)
    for seed in (torch.ones(1, dtype=torch.int64, device=device), torch.ones((), device=device)):
        with pytest.raises(RuntimeError, match=f"{op}: seed must be one int64 without dimensions"):
            operator(x, x, [3], *parameters, 1e-5, 0.5, seed)
