"""The modules DeformConv2d and DeformConv2dPack."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, run_python
from torch import nn

from myvision.nn import DeformConv2d, DeformConv2dPack

OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": (1, 0), "dilation": (2, 1), "groups": 2, "bias": False},
]


def pack(**options: Any) -> DeformConv2dPack:
    """With offsets that move, after the zeros of the start."""
    layer = DeformConv2dPack(4, 6, (3, 2), **options)
    nn.init.normal_(layer.conv_offset.weight, std=0.3)
    return layer


@pytest.mark.parametrize("options", OPTIONS)
def test_is_torchvisions_module(options: dict[str, Any]) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(1)
    ours = DeformConv2d(4, 6, (3, 2), **options)
    torch.manual_seed(1)
    theirs = torchvision.ops.DeformConv2d(4, 6, (3, 2), **options)
    assert isinstance(ours, torchvision.ops.DeformConv2d)
    assert repr(ours) == repr(theirs)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 4, 9, 9)
    size = nn.functional.conv2d(x, ours.weight, None, ours.stride, ours.padding, ours.dilation, ours.groups).shape[2:]
    offset, mask = torch.randn(2, 24, *size), torch.rand(2, 12, *size)
    torch.testing.assert_close(ours(x, offset, mask), theirs(x, offset, mask))
    torch.testing.assert_close(ours(x, offset), theirs(x, offset))


def test_works_without_torchvision() -> None:
    """Same state and repr, and what one kind of installation pickles the other loads."""
    pytest.importorskip("torchvision")
    layer = DeformConv2d(4, 6, (3, 2), stride=2, padding=1, groups=2)
    buffer = io.BytesIO()
    pickle.dump(layer, buffer)
    printed = run_python(
        f"""
import io, pickle, sys, torch
sys.modules["torchvision"] = None
from myvision.nn import DeformConv2d
loaded = pickle.loads({buffer.getvalue()!r})
assert type(loaded) is DeformConv2d
assert "_DeformConv2d" in [base.__name__ for base in type(loaded).__mro__]
torch.manual_seed(1)
layer = DeformConv2d(4, 6, (3, 2), stride=2, padding=1, groups=2)
assert repr(layer) == repr(loaded)
assert layer.__dict__.keys() == loaded.__dict__.keys()
loaded(torch.rand(1, 4, 5, 5), torch.rand(1, 12, 3, 3)).sum().backward()
print([float(p.double().sum()) for p in layer.parameters()])
"""
    )
    torch.manual_seed(1)
    layer = DeformConv2d(4, 6, (3, 2), stride=2, padding=1, groups=2)
    assert printed.strip() == str([float(p.double().sum()) for p in layer.parameters()])


@pytest.mark.parametrize("torchvision", [True, False])
def test_refuses_groups_that_do_not_divide(torchvision: bool) -> None:
    from myvision.nn.deform_conv2d import _DeformConv2d

    with pytest.raises(ValueError, match="groups"):
        (DeformConv2d if torchvision else _DeformConv2d)(4, 6, 3, groups=3)


def test_padding_by_name() -> None:
    layer = DeformConv2d(4, 6, (3, 2), padding="same")
    x = torch.rand(1, 4, 7, 8)
    expected = nn.functional.conv2d(x, layer.weight, layer.bias, padding="same")
    torch.testing.assert_close(layer(x, torch.zeros(1, 12, 7, 8)), expected)
    assert "padding=same" in repr(layer)
    with pytest.raises(ValueError, match="padding='same' needs stride 1"):
        DeformConv2d(4, 6, 3, stride=2, padding="same")
    with pytest.raises(ValueError, match="'same' or 'valid'"):
        DeformConv2d(4, 6, 3, padding="full")


@pytest.mark.parametrize("padding", [0, 1, "same"])
@pytest.mark.parametrize("modulated", [True, False])
def test_pack_starts_as_a_convolution(padding: Any, modulated: bool) -> None:
    layer = DeformConv2dPack(4, 6, 3, padding=padding, modulated=modulated, offset_groups=2, bias=False)
    x = torch.rand(2, 4, 8, 9)
    expected = nn.functional.conv2d(x, layer.weight, padding=padding)
    torch.testing.assert_close(layer(x), 0.5 * expected if modulated else expected)


def test_pack_predicts_as_mmcv_does() -> None:
    """Offsets first, (down, right) for each tap, then the masks through a sigmoid."""
    layer = pack(padding=1, offset_groups=2)
    x = torch.rand(2, 4, 8, 9)
    first, second, mask = layer.conv_offset(x).chunk(3, dim=1)
    expected = DeformConv2d.forward(layer, x, torch.cat([first, second], 1), mask.sigmoid())
    torch.testing.assert_close(layer(x), expected)
    assert list(layer.state_dict()) == ["weight", "bias", "conv_offset.weight", "conv_offset.bias"]


def test_pack_resets_to_zero_offsets() -> None:
    layer = pack()
    for module in layer.modules():
        module.reset_parameters()
    assert not layer.conv_offset.weight.any()
    assert layer.weight.any()


def test_pack_refuses_offset_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"in_channels \(4\) must be a multiple of offset_groups \(3\)"):
        DeformConv2dPack(4, 6, 3, offset_groups=3)


def test_pack_names_its_options() -> None:
    assert repr(DeformConv2dPack(4, 6, 3, padding=1, offset_groups=2)) == (
        "DeformConv2dPack(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), offset_groups=2, modulated=True)"
    )


def test_pack_trains_every_parameter() -> None:
    layer = DeformConv2dPack(4, 6, 3, padding=1)
    layer(torch.rand(2, 4, 8, 9)).square().sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("modulated", [True, False])
def test_pack_does_not_round_its_offsets_under_autocast(dtype: torch.dtype, modulated: bool, device: str) -> None:
    """The input is 1 in column 101 and else 0, and every sample is taken 100.3 columns to the right."""
    layer = DeformConv2dPack(1, 1, 1, bias=False, modulated=modulated).to(device)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        layer.conv_offset.bias[1] = 100.3
    x = torch.zeros(1, 1, 1, 128, device=device)
    x[..., 101] = 1
    for input_dtype in (torch.float32, dtype):
        with torch.autocast(device, dtype):
            output = layer(x.to(input_dtype))
        assert output.dtype == dtype
        expected = 0.15 if modulated else 0.3
        torch.testing.assert_close(output[0, 0, 0, 0].item(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    output.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": "same"}, {"padding": "valid", "bias": False}])
def test_scripts(options: dict[str, Any]) -> None:
    layer = DeformConv2d(4, 6, (3, 2), groups=2, **options)
    script = torch.jit.script(layer)
    assert "ops.myvision.deform_conv2d" in script._convolve.code
    x = torch.rand(2, 4, 9, 9)
    size = nn.functional.conv2d(x, layer.weight, None, padding=layer.padding, groups=2).shape[2:]
    offset, mask = torch.randn(2, 24, *size), torch.rand(2, 12, *size)
    assert torch.equal(script(x, offset, mask), layer(x, offset, mask))
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x, offset), layer(x, offset))


@pytest.mark.parametrize("modulated", [True, False])
def test_pack_scripts(modulated: bool) -> None:
    layer, x = pack(padding="same", offset_groups=2, modulated=modulated), torch.rand(2, 4, 9, 9)
    assert torch.equal(torch.jit.script(layer)(x), layer(x))


def test_constructors_have_torchvisions_signature() -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs, ours, packs = (
        {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        for cls in (torchvision.ops.DeformConv2d, DeformConv2d, DeformConv2dPack)
    )
    assert ours == theirs
    assert packs == theirs | {"offset_groups": 1, "modulated": True}


def test_torchvisions_module_becomes_ours() -> None:
    torchvision = pytest.importorskip("torchvision")
    layer = torchvision.ops.DeformConv2d(4, 6, 3, padding=1)
    x, offset = torch.rand(1, 4, 7, 7), torch.randn(1, 18, 7, 7)
    expected = layer(x, offset)
    layer.__class__ = DeformConv2d
    torch.testing.assert_close(layer(x, offset), expected)


def test_copies_and_files() -> None:
    layer, x = pack(padding="same"), torch.rand(1, 4, 7, 7)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = DeformConv2dPack(4, 6, (3, 2), padding="same")
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), layer(x))


def test_functional_call() -> None:
    layer, x = pack(), torch.rand(1, 4, 7, 7)
    doubled = {name: 2 * parameter for name, parameter in layer.named_parameters() if name in ("weight", "bias")}
    torch.testing.assert_close(torch.func.functional_call(layer, doubled, (x,)), 2 * layer(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype, device: str) -> None:
    layer = pack(padding=1).to(device, dtype)
    assert layer(torch.rand(1, 4, 7, 7, device=device, dtype=dtype)).dtype == dtype


def test_meta_device() -> None:
    with torch.device("meta"):
        layer = DeformConv2dPack(4, 6, 3, padding=1)
        assert layer(torch.rand(2, 4, 7, 9)).shape == (2, 6, 7, 9)
    layer.to_empty(device="cpu").load_state_dict(DeformConv2dPack(4, 6, 3, padding=1).state_dict())
    assert layer(torch.rand(2, 4, 7, 9)).isfinite().all()


def test_importing_myvision_does_not_import_torchvision() -> None:
    assert run_python("import sys, myvision; print('torchvision' in sys.modules)").strip() == "False"
