"""group_norm: what sets it apart from the other norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor
from norm_cases import Case

from myvision.ops import group_norm, instance_norm


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 7), (3, 6, 5, 4), (2, 6, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_is_torchs_function(shape: tuple[int, ...], groups: int, device: str) -> None:
    input = random_tensor(*shape, device=device)
    weight, bias = random_tensor(6, device=device, seed=1), random_tensor(6, device=device, seed=2)
    torch.testing.assert_close(group_norm(input, groups), F.group_norm(input, groups))
    expected = F.group_norm(input, groups, weight, bias, 1e-3)
    torch.testing.assert_close(group_norm(input, groups, weight, bias, 1e-3), expected)


@pytest.mark.parametrize("groups", [1, 2, 4, 7, 14, 28])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted"])
def test_numbers_of_groups(groups: int, layout: str, device: str) -> None:
    case = Case("group_norm", (2, 28, 5, 3), groups=groups, activation="silu")
    case.check(torch.float32, device, layout)
    case.check(torch.bfloat16, device, layout)


def test_a_group_of_one_channel_is_instance_norm(device: str) -> None:
    input = random_tensor(2, 6, 5, 4, device=device)
    torch.testing.assert_close(group_norm(input, 6), instance_norm(input))


def test_one_value_per_group_is_torchs_error() -> None:
    for function in (group_norm, F.group_norm):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            function(torch.ones(1, 3), 3)


@pytest.mark.parametrize("groups", [0, -1, 4, 7])
def test_groups_that_do_not_divide(groups: int) -> None:
    with pytest.raises(RuntimeError, match=f"num_groups must be a divisor .* 6, but is {groups}"):
        group_norm(torch.ones(2, 6, 3), groups)
