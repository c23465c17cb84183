"""What linear refuses: kernel and fake in the same words, which tell the argument, what it got and what it wants."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import random_tensor
from linear_cases import NAMES, PLAIN, SEED
from torch import Tensor
from torch._subclasses import FakeTensorMode

from myvision.ops import linear

Change = Callable[[Tensor], Any]

# name: which argument is changed, to what, and what is said
BAD: dict[str, tuple[str, Change, str]] = {
    **{
        f"integer {name}": (name, Tensor.int, message)
        for name, message in {
            "input": "input must have dtype float64, float32, float16 or bfloat16, but has int32",
            "weight": "weight must have the dtype of input, float32, but has int32",
            "bias": "bias must have the dtype of input, float32, but has int32",
            "residual": "residual must have the dtype of input, float32, but has int32",
        }.items()
    },
    "complex input": ("input", lambda t: t.to(torch.complex64), "input must have dtype .*, but has complex64"),
    **{
        f"{name} of another dtype": (
            name,
            Tensor.double,
            f"{name} must have the dtype of input, float32, but has float64",
        )
        for name in ("weight", "bias", "residual")
    },
    **{f"a list as {name}": (name, Tensor.tolist, f"{name} must be a tensor, but got list") for name in NAMES},
    **{f"no {name}": (name, lambda _: None, f"{name} must be a tensor, but got NoneType") for name in NAMES[:2]},
    "input without dimensions": (
        "input",
        lambda t: t[0, 0, 0, 0],
        r"input must have 11 features in its last dimension, as weight has, but has shape \(\)",
    ),
    "input of other features": (
        "input",
        lambda t: t[..., 1:],
        r"input must have 11 features in its last dimension, as weight has, but has shape \(2, 3, 5, 10\)",
    ),
    "weight of one dimension": (
        "weight",
        lambda t: t[0],
        r"weight must have shape \(outputs, features\), but has shape \(11,\)",
    ),
    "weight of three dimensions": (
        "weight",
        lambda t: t[None],
        r"weight must have shape \(outputs, features\), but has shape \(1, 17, 11\)",
    ),
    "bias of another size": ("bias", lambda t: t[1:], r"bias must have shape \(17,\), but has shape \(16,\)"),
    "bias of another rank": ("bias", lambda t: t[None], r"bias must have shape \(17,\), but has shape \(1, 17\)"),
    "residual of another shape": (
        "residual",
        lambda t: t[:1],
        r"residual must have shape \(2, 3, 5, 17\), but has shape \(1, 3, 5, 17\)",
    ),
    "residual of another rank": (
        "residual",
        lambda t: t[0],
        r"residual must have shape \(2, 3, 5, 17\), but has shape \(3, 5, 17\)",
    ),
}


def says(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, TypeError)) as raised:
        call()
    return str(raised.value)


def says_everywhere(call: Callable[[list[Any]], Any], arguments: list[Any]) -> str:
    """The message, which is the same of the kernel, the fake, and in every mode."""
    eager = says(lambda: call(arguments))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments]
        assert says(lambda: call(fakes)) == eager
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert says(lambda: call(arguments)) == eager
    return eager


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_in_eager_and_fake_alike(name: str, real_device: str) -> None:
    changed, change, pattern = BAD[name]
    tensors = dict(zip(NAMES, PLAIN.tensors(device=real_device), strict=True))
    tensors[changed] = change(tensors[changed])
    message = says_everywhere(PLAIN.run, list(tensors.values()))
    assert re.fullmatch(f"linear: {pattern}", message), message


@pytest.mark.parametrize("name", NAMES[1:])
def test_another_device(name: str) -> None:
    tensors = PLAIN.tensors()
    tensors[NAMES.index(name)] = tensors[NAMES.index(name)].to("meta")
    with pytest.raises(RuntimeError, match=f"linear: {name} must be on the device of input, cpu, but is on meta"):
        PLAIN.run(tensors)


@pytest.mark.parametrize("activation", ["tanh", "ReLU", ""])
def test_unknown_activations(activation: str, real_device: str) -> None:
    message = says_everywhere(PLAIN.but(activation=activation).run, PLAIN.tensors(device=real_device))
    assert re.fullmatch(
        f"linear: activation must be one of None, 'relu', .*'hardswish', but is '{activation}'", message
    )


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_bad_probabilities(p: float, real_device: str) -> None:
    tensors = PLAIN.tensors(device=real_device)
    of_function = says_everywhere(lambda tensors: linear(*tensors[:3], dropout_p=p), tensors)
    of_operator = says_everywhere(PLAIN.but(dropout_p=p).run, tensors)
    assert of_function == of_operator == f"linear: dropout_p must be between 0 and 1, but is {p:g}"


@pytest.mark.parametrize(
    ("seed", "pattern"),
    [
        (None, "dropout needs a seed, but seed is None"),
        (torch.ones(1, dtype=torch.int64), r"seed must be one int64 without dimensions, but is int64 of shape \(1,\)"),
        (torch.ones(()), r"seed must be one int64 without dimensions, but is float32 of shape \(\)"),
    ],
    ids=str,
)
def test_seeds(seed: Tensor | None, pattern: str, real_device: str) -> None:
    input, weight, *_ = PLAIN.tensors(device=real_device)

    def call(arguments: list[Any]) -> Tensor:
        return torch.ops.myvision.linear(*arguments[:2], None, None, 0.0, 0.5, arguments[2], None)

    message = says_everywhere(call, [input, weight, seed if seed is None else seed.to(real_device)])
    assert re.fullmatch(f"linear: {pattern}", message), message


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


# name: the activation, what is changed, to what, and what is said
BAD_BACKWARD: dict[str, tuple[str | None, str, Callable[[Any], Any], str]] = {
    "gradient of another shape": (
        "relu",
        "grad_output",
        lambda t: t[:, :3],
        r"grad_output must have shape \(4, 5\), but has shape \(4, 3\)",
    ),
    "gradient of another dtype": (
        "relu",
        "grad_output",
        Tensor.double,
        "grad_output must have the dtype of input, float32, but has float64",
    ),
    "preactivation of another shape": (
        "relu",
        "preactivation",
        lambda t: t[1:],
        r"preactivation must have shape \(4, 5\), but has shape \(3, 5\)",
    ),
    "no preactivation": (
        "relu",
        "preactivation",
        lambda t: t.new_empty(0),
        r"preactivation must have shape \(4, 5\), but has shape \(0,\)",
    ),
    "preactivation without an activation": (
        None,
        "preactivation",
        lambda t: t.new_empty(4, 5),
        r"preactivation must have shape \(0,\), but has shape \(4, 5\)",
    ),
    "preactivation with gaps": ("relu", "preactivation", strided, "preactivation must be contiguous"),
    "preactivation of another dtype": (
        "relu",
        "preactivation",
        Tensor.half,
        "preactivation must have the dtype of input, float32, but has float16",
    ),
    "features of another number": (
        "relu",
        "input",
        lambda t: t[:, 1:],
        r"input must have 3 features in its last dimension, as weight has, but has shape \(4, 2\)",
    ),
}


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_bad_input_of_backward(name: str, real_device: str) -> None:
    activation, changed, change, pattern = BAD_BACKWARD[name]
    input, weight = (random_tensor(rows, 3, device=real_device, seed=rows) for rows in (4, 5))
    arguments: dict[str, Any] = {
        "grad_output": input.new_ones(4, 5),
        "input": input,
        "weight": weight,
        "bias": None,
        "preactivation": input.new_ones(4, 5) if activation else input.new_ones(0),
        "activation": activation,
        "negative_slope": 0.1,
        "dropout_p": 0.5,
        "seed": torch.tensor(SEED, device=real_device),
        "output_mask": [True, True, True],
    }
    torch.ops.myvision._linear_backward(**arguments)
    arguments[changed] = change(arguments[changed])

    def call(values: list[Any]) -> Any:
        return torch.ops.myvision._linear_backward(**dict(zip(arguments, values, strict=True)))

    message = says_everywhere(call, list(arguments.values()))
    assert re.fullmatch(f"linear: {pattern}", message), message
