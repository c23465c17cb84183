"""Calls of deform_conv2d that must raise, and what they must say. Run as a program it prints what they do say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from deform_conv2d_cases import NAMES, Case
from torch._subclasses import FakeTensorMode

CASE = Case(in_channels=6, groups=2, offset_groups=3)
TENSORS = dict(zip(NAMES, CASE.tensors(), strict=True))
GEOMETRY = dict(zip(["stride", "padding", "dilation", "groups", "offset_groups"], CASE.geometry, strict=True))
GOOD = TENSORS | GEOMETRY


def changed(**values: Any) -> dict[str, Any]:
    return GOOD | values


# What is wrong -> (what the message says, the arguments)
FORWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "input of rank 3": ("input must have 4 dimensions", changed(input=torch.ones(6, 7, 9))),
    "weight of rank 3": ("weight must have 4 dimensions", changed(weight=torch.ones(6, 3, 3))),
    "offset of rank 2": ("offset must have 4 dimensions", changed(offset=torch.ones(2, 54))),
    "mask of rank 5": ("mask must have 4 dimensions", changed(mask=torch.ones(2, 27, 7, 9, 1))),
    "bias of rank 2": ("bias must have 1 dimensions", changed(bias=torch.ones(6, 1))),
    "bias of rank 0": ("bias must have 1 dimensions", changed(bias=torch.ones(()))),
    "integer input": ("input must have dtype float64, .* but has int64", changed(input=GOOD["input"].long())),
    "complex input": ("input must have dtype float64, .* but has complex64", changed(input=GOOD["input"] + 0j)),
    "bool input": ("input must have dtype float64, .* but has bool", changed(input=GOOD["input"] > 0)),
    "half weight": ("weight must have the dtype of input, float32, but", changed(weight=GOOD["weight"].half())),
    "double offset": ("offset must have the dtype of input, float32, but", changed(offset=GOOD["offset"].double())),
    "half offset": (
        "offset must have the dtype of input, float32, but has float16",
        changed(offset=GOOD["offset"].half()),
    ),
    "double offset beside half types": (
        "offset must have the dtype of input, bfloat16, or float32, but has float64",
        {
            **{name: tensor.bfloat16() for name, tensor in TENSORS.items()},
            **GEOMETRY,
            "offset": TENSORS["offset"].double(),
        },
    ),
    "other half offset": (
        "offset must have the dtype of input, float16, or float32, but has bfloat16",
        {
            **{name: tensor.half() for name, tensor in TENSORS.items()},
            **GEOMETRY,
            "offset": TENSORS["offset"].bfloat16(),
        },
    ),
    "float8 input": (
        "input must have dtype float64, .* but has float8_e5m2",
        changed(input=GOOD["input"].to(torch.float8_e5m2)),
    ),
    "bfloat16 mask": ("mask must have the dtype of input, float32, but", changed(mask=GOOD["mask"].bfloat16())),
    "integer bias": ("bias must have the dtype of input, float32, but", changed(bias=GOOD["bias"].int())),
    "no input channels": ("in_channels .* must be between 1", changed(input=torch.ones(2, 0, 7, 9))),
    "no rows": ("height .* must be between 1", changed(input=torch.ones(2, 6, 0, 9))),
    "no columns": ("width .* must be between 1", changed(input=torch.ones(2, 6, 7, 0))),
    "kernel without rows": ("kernel height .* must be between 1", changed(weight=torch.ones(6, 3, 0, 3))),
    "kernel without columns": ("kernel width .* must be between 1", changed(weight=torch.ones(6, 3, 3, 0))),
    "kernel of too many rows": ("kernel height .* must be between 1", changed(weight=torch.ones(0, 3, 2**40, 1))),
    "other input channels": ("must be the number of input channels, 8", changed(input=torch.ones(2, 8, 7, 9))),
    "other weight channels": ("must be the number of input channels, 6", changed(weight=torch.ones(6, 2, 3, 3))),
    "groups that do not divide the input": ("must be the number of input channels, 6", changed(groups=4)),
    "groups that do not divide the output": (
        "out_channels .* must be a multiple of",
        changed(weight=torch.ones(5, 3, 3, 3)),
    ),
    "groups of 0": ("groups must be between 1", changed(groups=0)),
    "groups below 0": ("groups must be between 1", changed(groups=-2)),
    "groups past counting": ("groups must be between 1", changed(groups=2**62)),
    "offset groups that do not divide": (
        "in_channels .* must be a multiple of offset_groups",
        changed(offset_groups=4),
    ),
    "offset groups of 0": ("offset_groups must be between 1", changed(offset_groups=0)),
    "offset groups past counting": ("offset_groups must be between 1", changed(offset_groups=2**62)),
    "too few offset channels": (r"offset must have shape \(2, 54, 7, 9\)", changed(offset=torch.ones(2, 8, 7, 9))),
    "no offset channels": (r"offset must have shape \(2, 54, 7, 9\)", changed(offset=torch.ones(2, 0, 7, 9))),
    "too many mask channels": (r"mask must have shape \(2, 27, 7, 9\)", changed(mask=torch.ones(2, 54, 7, 9))),
    "offset of another batch": (r"offset must have shape \(2, 54, 7, 9\)", changed(offset=torch.ones(1, 54, 7, 9))),
    "mask of another batch": (r"mask must have shape \(2, 27, 7, 9\)", changed(mask=torch.ones(3, 27, 7, 9))),
    "offset of another height": (r"offset must have shape \(2, 54, 7, 9\)", changed(offset=torch.ones(2, 54, 8, 9))),
    "mask of another width": (r"mask must have shape \(2, 27, 7, 9\)", changed(mask=torch.ones(2, 27, 7, 1))),
    "bias of another length": (r"bias must have shape \(6,\)", changed(bias=torch.ones(7))),
    "stride of 0": ("stride must be between 1", changed(stride=(0, 1))),
    "stride below 0": ("stride must be between 1", changed(stride=(1, -1))),
    "dilation of 0": ("dilation must be between 1", changed(dilation=(1, 0))),
    "padding below 0": ("padding must be between 0", changed(padding=(-1, 1))),
    "padding past counting": ("padding must be between 0", changed(padding=(2**62, 1))),
    "stride of three numbers": ("stride must have 2 elements", changed(stride=(1, 1, 1))),
    "padding of one number": ("padding must have 2 elements", changed(padding=(1,))),
    "kernel larger than the image": (
        "the dilated kernel, 3 x 3, must fit into the padded input, 1 x 9",
        changed(input=torch.ones(2, 6, 1, 9), padding=(0, 0), offset=torch.ones(2, 54, 1, 7), mask=None),
    ),
    "dilated kernel larger than the image": ("the dilated kernel, 3 x 21, must fit", changed(dilation=(1, 10))),
    "planes past 32 bits": (
        r"planes of 65536 x 32768 pixels; on the CPU they must have less than 2\^31",
        {
            "input": torch.zeros(1).expand(1, 1, 2**16, 2**15),
            "weight": torch.ones(1, 1, 1, 1),
            "offset": torch.zeros(1, 2, 2, 1),
            "mask": None,
            "bias": None,
            "stride": (2**15, 2**15),
            "padding": (0, 0),
            "dilation": (1, 1),
            "groups": 1,
            "offset_groups": 1,
        },
    ),
    "division that rounds up to 1": (  # (6 - 7) / 2 + 1
        "the dilated kernel, 7 x 3, must fit",
        changed(input=torch.ones(2, 6, 6, 9), dilation=(3, 1), stride=(2, 1), padding=(0, 1)),
    ),
}

GRADIENT = CASE.grad_output()
BACKWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "grad_output of rank 3": ("grad_output must have 4 dimensions", {"grad_output": GRADIENT[0]}),
    "grad_output of another type": ("grad_output must have the dtype of input", {"grad_output": GRADIENT.double()}),
    "grad_output of another size": (r"grad_output must have shape \(2, 6, 7, 9\)", {"grad_output": GRADIENT[:, :5]}),
    "gradient of no mask": ("asks for the gradient of mask", {"mask": None}),
    "four gradients": ("output_mask must have 5 elements", {"output_mask": [True] * 4}),
    "double offset in backward": ("offset must have the dtype of input", {"offset": TENSORS["offset"].double()}),
    "stride of 0 in backward": ("stride must be between 1", {"stride": (0, 1)}),
}


def call_forward(arguments: dict[str, Any]) -> None:
    torch.ops.myvision.deform_conv2d(*arguments.values())


def call_backward(changes: dict[str, Any]) -> None:
    inputs = {name: value for name, value in GOOD.items() if name != "bias"}
    arguments = {"grad_output": GRADIENT, **inputs, "output_mask": [True] * 5, "deterministic": False} | changes
    torch.ops.myvision._deform_conv2d_backward(*arguments.values())


def message_of(call: Callable[..., None], arguments: dict[str, Any]) -> str:
    try:
        call(arguments)
    except RuntimeError as error:
        return str(error)
    return "no error"


def main() -> None:
    """Prints for each call its name, and the messages in eager mode and in fake mode, as a line of JSON."""
    call_forward(GOOD)
    call_backward({})
    for table, call in ((FORWARD, call_forward), (BACKWARD, call_backward)):
        for name, (_, arguments) in table.items():
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fakes = {
                    key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                    for key, value in arguments.items()
                }
                fake = message_of(call, fakes)
            print(json.dumps([name, message_of(call, arguments), fake]), flush=True)
