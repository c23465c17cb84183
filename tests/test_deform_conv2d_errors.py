"""deform_conv2d: bad input is told, in eager mode and in fake mode alike, and never crashes."""

from __future__ import annotations

import json
import re

import pytest
import torch
from deform_conv2d_bad_inputs import BACKWARD, FORWARD, GOOD, call_forward, changed
from deform_conv2d_cases import NAMES, Case
from helpers import run_python

from myvision.ops import deform_conv2d


@pytest.fixture(scope="module")
def messages() -> dict[str, tuple[str, str]]:
    """What each bad call says in eager and in fake mode, from one process that has to survive them all."""
    printed = run_python("import deform_conv2d_bad_inputs; deform_conv2d_bad_inputs.main()")
    return {name: (eager, fake) for name, eager, fake in map(json.loads, printed.splitlines())}


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_bad_input_raises_in_eager_and_fake_alike(name: str, messages: dict[str, tuple[str, str]]) -> None:
    pattern, _ = (FORWARD | BACKWARD)[name]
    eager, fake = messages[name]
    assert re.search(pattern, eager), eager
    assert eager.startswith("deform_conv2d: ")
    assert fake == eager


@pytest.mark.parametrize("name", ["weight", "offset", "mask", "bias"])
def test_another_device(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} must be on the device of input, cpu, but is on meta"):
        call_forward(changed(**{name: GOOD[name].to("meta")}))


@pytest.mark.parametrize("name", ["weight", "offset", "mask", "bias"])
def test_another_device_on_the_gpu(name: str, gpu: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} must be on the device of input"):
        call_forward(changed(**{name: GOOD[name].to(gpu)}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_checks_run_in_every_mode(mode: type, device: str) -> None:
    input, weight, offset, *_ = (t.to(device) for t in Case().tensors())
    with mode(), pytest.raises(RuntimeError, match="offset must have shape"):
        deform_conv2d(input, offset[:, :4], weight, padding=1)


def test_wrong_ranks_reach_the_check() -> None:
    with pytest.raises(RuntimeError, match="input must have 4 dimensions"):
        deform_conv2d(torch.ones(3), torch.ones(1, 18, 1, 1), torch.ones(1, 1, 3, 3))
    with pytest.raises(RuntimeError, match="weight must have 4 dimensions"):
        deform_conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 18, 1, 1), torch.ones(()))
    with pytest.raises(RuntimeError, match="offset must have 4 dimensions"):
        deform_conv2d(torch.ones(1, 1, 3, 3), torch.ones(18), torch.ones(1, 1, 3, 3), padding="same")


@pytest.mark.parametrize("name", NAMES)
def test_a_list_is_no_tensor(name: str) -> None:
    tensors = dict(zip(NAMES, Case().tensors(), strict=True))
    with pytest.raises(TypeError, match=rf"^deform_conv2d: {name} must be a tensor, but got list$"):
        deform_conv2d(**tensors | {name: tensors[name].tolist()}, padding=1)


def test_none_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"^deform_conv2d: offset must be a tensor, but got NoneType$"):
        deform_conv2d(torch.ones(1, 1, 3, 3), None, torch.ones(1, 1, 3, 3))


def test_weight_without_channels_or_taps() -> None:
    input, offset = torch.ones(1, 4, 3, 3), torch.ones(1, 18, 1, 1)
    with pytest.raises(RuntimeError, match="must be the number of input channels"):
        deform_conv2d(input, offset, torch.ones(2, 0, 3, 3))
    with pytest.raises(RuntimeError, match="kernel height"):
        deform_conv2d(input, offset, torch.ones(2, 4, 0, 3))


def test_words_for_padding() -> None:
    input, weight, offset, *_ = Case().tensors()
    with pytest.raises(ValueError, match="padding must be numbers, 'same' or 'valid', but is 'full'"):
        deform_conv2d(input, offset, weight, padding="full")
    with pytest.raises(ValueError, match="padding='same' needs stride 1"):
        deform_conv2d(input, offset, weight, padding="same", stride=2)
