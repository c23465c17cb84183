"""layer_norm: what sets it apart from the other norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor
from norm_cases import Case
from torch import Tensor

from myvision.ops import layer_norm

NORMALIZED = [(7,), (5, 7), (3, 5, 7)]


@pytest.mark.parametrize("normalized_shape", NORMALIZED, ids=str)
def test_is_torchs_function(normalized_shape: tuple[int, ...], device: str) -> None:
    input = random_tensor(3, 5, 7, device=device)
    weight, bias = (random_tensor(*normalized_shape, device=device, seed=seed) for seed in (1, 2))
    torch.testing.assert_close(layer_norm(input, normalized_shape), F.layer_norm(input, normalized_shape))
    expected = F.layer_norm(input, normalized_shape, weight, bias, 1e-3)
    torch.testing.assert_close(layer_norm(input, list(normalized_shape), weight, bias, 1e-3), expected)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 5, 4), (2, 6, 3, 2, 4)], ids=str)
def test_channels_first_needs_no_permute(shape: tuple[int, ...], layout: str, device: str) -> None:
    case = Case("layer_norm", shape, channels="first", activation="gelu")
    case.check(torch.float32, device, layout)
    tensors = case.tensors(torch.float32, device, layout)
    channels_last = [t.movedim(1, -1) if t is not None and t.dim() > 1 else t for t in tensors]
    expected = case.but(channels="last", shape=(*shape[:1], *shape[2:], 6)).run(channels_last)[0].movedim(-1, 1)
    torch.testing.assert_close(case.run(tensors)[0], expected)


@pytest.mark.parametrize("normalized_dims", [1, 2, 3, 4])
def test_numbers_of_dimensions(normalized_dims: int, layout: str, device: str) -> None:
    Case("layer_norm", (3, 4, 5, 6), normalized_dims=normalized_dims).check(torch.float32, device, layout)


def test_rows_do_not_depend_on_each_other(device: str) -> None:
    case = Case("layer_norm", (37, 100), activation="relu")
    tensors = case.tensors(device=device)
    whole = case.run(tensors)[0]
    some = case.run([tensors[0][5:9], *tensors[1:3], tensors[3][5:9], None, None])[0]
    assert torch.equal(whole[5:9], some)


def test_rows_of_one_element_give_the_bias(device: str) -> None:
    input, bias = random_tensor(5, 1, device=device), torch.full((1,), 0.3, device=device)
    torch.testing.assert_close(layer_norm(input, (1,), None, bias), bias.expand(5, 1), rtol=0, atol=0)


BAD: dict[str, tuple[Tensor, tuple[int, ...], str, str]] = {
    "too long": (torch.ones(2, 3), (4,), "last", r"normalized_shape .* \(4\)|normalized_shape .*\(4,\)"),
    "no dimensions": (torch.ones(2, 3), (), "last", "normalized_shape must be the last dimensions"),
    "too many": (torch.ones(3), (2, 3), "last", "normalized_shape must be the last dimensions"),
    "first of another size": (torch.ones(2, 3, 4), (4,), "first", "must be the size of dimension 1"),
    "first of two": (torch.ones(2, 3, 4), (3, 4), "first", "must be the size of dimension 1"),
    "first of a vector": (torch.ones(3), (3,), "first", "must be the size of dimension 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_shapes(name: str) -> None:
    input, normalized_shape, channels, message = BAD[name]
    for tensor in (input, input.to("meta")):
        with pytest.raises(RuntimeError, match=message):
            layer_norm(tensor, normalized_shape, channels=channels)


def test_bad_channels() -> None:
    with pytest.raises(ValueError, match="channels must be 'first' or 'last', but is 'middle'"):
        layer_norm(torch.ones(2, 3), (3,), channels="middle")
