"""instance_norm: what sets it apart from the other norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor, with_layout
from norm_cases import Case
from test_batch_norm import statistics

from myvision._formulas.instance_norm import instance_norm_update as reference_update
from myvision.ops import instance_norm


@pytest.mark.parametrize("shape", [(4, 6, 7), (3, 6, 5, 4), (2, 6, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("use_input_stats", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
def test_is_torchs_function(shape: tuple[int, ...], use_input_stats: bool, momentum: float, device: str) -> None:
    input, weight, bias = random_tensor(*shape, device=device), *statistics(device=device)
    ours, theirs = (statistics(device=device) for _ in range(2))
    expected = F.instance_norm(input, *theirs, weight, bias, use_input_stats, momentum)
    torch.testing.assert_close(instance_norm(input, *ours, weight, bias, use_input_stats, momentum), expected)
    torch.testing.assert_close(ours, theirs)


def test_defaults_are_torchs() -> None:
    input = random_tensor(3, 6, 5)
    torch.testing.assert_close(instance_norm(input), F.instance_norm(input))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted"])
def test_running_statistics(floating_dtype: torch.dtype, layout: str, device: str) -> None:
    input = with_layout(random_tensor(4, 6, 5, 9, dtype=floating_dtype, device=device) * 3 + 1, layout)
    running = statistics(6, torch.float32, device)
    expected = tuple(t.double() for t in running)
    instance_norm(input, *running, None, None, True, 0.3)
    reference_update(input.double(), *expected, None, None, None, 0.3, 1e-5, None, 0.0)
    for actual, oracle in zip(running, expected, strict=True):
        torch.testing.assert_close(actual.double(), oracle, rtol=1e-6, atol=1e-6)


def test_empty_batches_leave_the_statistics(device: str) -> None:
    running, before = statistics(device=device), statistics(device=device)
    assert instance_norm(torch.empty(0, 6, 5, device=device), *running).shape == (0, 6, 5)
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


def test_one_value_per_channel_is_torchs_error() -> None:
    for function in (instance_norm, F.instance_norm):
        with pytest.raises(ValueError, match="Expected more than 1 spatial element when training"):
            function(torch.ones(2, 3, 1, 1))
    assert instance_norm(torch.ones(2, 6, 1, 1), *statistics(), use_input_stats=False).shape == (2, 6, 1, 1)


def test_images_do_not_depend_on_each_other(device: str) -> None:
    case = Case("instance_norm", (3, 6, 15, 14), activation="relu")
    tensors = case.tensors(device=device)
    whole = case.run(tensors)[0]
    one = case.run([tensors[0][1:2], *tensors[1:3], tensors[3][1:2], None, None])[0]
    assert torch.equal(whole[1:2], one)
