"""The modules of the norms: torch's in every respect, and those with an activation, which nothing drops."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor, run_python
from torch import Tensor, nn
from torch.fx.experimental import optimization
from torch.nn.utils import fusion

import myvision.nn as ours


@dataclass(frozen=True)
class Kind:
    """A class of ours, its counterpart of torch, and how it is made and called."""

    name: str
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.options or ''}"

    def make(self, **options: Any) -> Any:
        return getattr(ours, self.name)(*self.arguments, **self.options, **options)

    def fused(self, **options: Any) -> Any:
        return getattr(ours, self.name.replace("Norm", "NormAct"))(*self.arguments, **self.options, **options)

    def theirs(self, **options: Any) -> nn.Module:
        if self.name == "FrozenBatchNorm2d":
            return pytest.importorskip("torchvision").ops.FrozenBatchNorm2d(*self.arguments, **self.options, **options)
        return getattr(nn, self.name)(*self.arguments, **self.options, **options)

    def input(self, seed: int = 0) -> Tensor:
        return random_tensor(*self.shape, seed=seed) * 2 + 1

    @property
    def tracks(self) -> bool:
        return "BatchNorm" in self.name and "Frozen" not in self.name


PLAIN = [
    Kind("BatchNorm1d", (6,), (5, 6)),
    Kind("BatchNorm1d", (6,), (5, 6, 3)),
    Kind("BatchNorm2d", (6,), (3, 6, 4, 5)),
    Kind("BatchNorm3d", (6,), (3, 6, 2, 4, 5)),
    Kind("SyncBatchNorm", (6,), (3, 6, 4, 5)),
    Kind("InstanceNorm1d", (6,), (3, 6, 5)),
    Kind("InstanceNorm2d", (6,), (3, 6, 4, 5)),
    Kind("InstanceNorm2d", (6,), (6, 4, 5)),
    Kind("InstanceNorm3d", (6,), (3, 6, 2, 4, 5)),
    Kind("GroupNorm", (3, 6), (3, 6, 4, 5)),
    Kind("LayerNorm", (5,), (3, 6, 4, 5)),
    Kind("LayerNorm", ((4, 5),), (3, 6, 4, 5)),
    Kind("RMSNorm", (5,), (3, 6, 4, 5)),
    Kind("FrozenBatchNorm2d", (6,), (3, 6, 4, 5)),
]
VARIANTS = [
    Kind("BatchNorm2d", (6,), (3, 6, 4, 5), {"affine": False}),
    Kind("BatchNorm2d", (6,), (3, 6, 4, 5), {"track_running_stats": False}),
    Kind("BatchNorm2d", (6,), (3, 6, 4, 5), {"momentum": None}),
    Kind("BatchNorm2d", (6, 1e-3, 0.3), (3, 6, 4, 5)),
    Kind("SyncBatchNorm", (6,), (3, 6, 4, 5), {"momentum": None}),
    Kind("InstanceNorm2d", (6,), (3, 6, 4, 5), {"affine": True}),
    Kind("InstanceNorm2d", (6,), (3, 6, 4, 5), {"affine": True, "track_running_stats": True}),
    Kind("InstanceNorm2d", (6,), (3, 6, 4, 5), {"track_running_stats": True, "momentum": None}),
    Kind("GroupNorm", (2, 6, 1e-3), (3, 6, 4, 5), {"affine": False}),
    Kind("LayerNorm", (5,), (3, 6, 4, 5), {"elementwise_affine": False}),
    Kind("LayerNorm", (5,), (3, 6, 4, 5), {"bias": False}),
    Kind("RMSNorm", (5,), (3, 6, 4, 5), {"elementwise_affine": False}),
    Kind("RMSNorm", (5, 1e-2), (3, 6, 4, 5)),
]
FUSED = [kind for kind in PLAIN if kind.shape[0] != 6] + [VARIANTS[2], VARIANTS[6]]


def scrambled(module: Any) -> Any:
    """With parameters and statistics that show."""
    with torch.no_grad():
        for i, tensor in enumerate([*module.parameters(), *module.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(random_tensor(*tensor.shape, seed=i).abs() + 0.1)
    return module


def after_steps(module: Any, kind: Kind) -> list[Tensor]:
    """The outputs of two steps of training and one of evaluation, and the gradients of the second."""
    module.train()
    first, input = module(kind.input(1).double()), kind.input(2).double().requires_grad_()
    second = module(input)
    second.pow(3).sum().backward()
    gradients = [input.grad, *[parameter.grad for parameter in module.parameters()]]
    return [first, second, *gradients, module.eval()(kind.input(3).double())]


@pytest.mark.parametrize("kind", [*PLAIN, *VARIANTS], ids=str)
def test_is_torchs_module(kind: Kind) -> None:
    module, theirs = kind.make().double(), kind.theirs().double()
    assert isinstance(module, type(theirs))
    assert inspect.signature(type(module)) == inspect.signature(type(theirs))
    assert repr(module) == repr(theirs)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    scrambled(theirs)
    module.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(after_steps(module, kind), after_steps(theirs, kind))
    assert module.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(dict(module.state_dict()), dict(theirs.state_dict()))
    assert module.training is False


@pytest.mark.parametrize("kind", [k for k in PLAIN if k.tracks or k.name in ("InstanceNorm2d", "GroupNorm")], ids=str)
def test_without_bias(kind: Kind) -> None:
    """Where torch's module takes bias=False, ours does; where it does not, both refuse."""
    options = {"bias": False} | ({"affine": True} if "Instance" in kind.name else {})
    try:
        theirs = kind.theirs(**options)
    except TypeError:
        with pytest.raises(TypeError):
            kind.make(**options)
        return
    module = kind.fused(**options, activation="relu")
    assert module.bias is None
    module.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(module(kind.input()), theirs(kind.input()).relu())


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_activation_and_residual(kind: Kind) -> None:
    module, theirs = scrambled(kind.fused(activation="gelu")), scrambled(kind.theirs())
    input, residual = kind.input(), kind.input(1)
    for train in (True, False):
        module.train(train), theirs.train(train)
        torch.testing.assert_close(module(input), F.gelu(theirs(input)))
        torch.testing.assert_close(module(input, residual=residual), F.gelu(theirs(input) + residual))


def test_unbatched_instance_norm_with_residual() -> None:
    module, theirs = ours.InstanceNormAct2d(6), nn.InstanceNorm2d(6)
    input, residual = random_tensor(6, 4, 5), random_tensor(6, 4, 5, seed=1)
    torch.testing.assert_close(module(input, residual), (theirs(input) + residual).relu())


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_channels_first(name: str) -> None:
    module, fused = (getattr(ours, f"{name}2d")(6, **options) for options in ({}, {"activation": "silu"}))
    theirs = scrambled(getattr(nn, name)(6))
    for other in (module, fused):
        other.load_state_dict(theirs.state_dict())
        assert not isinstance(other, getattr(nn, name))  # whatever knows torch's would take the last dimension
    input = random_tensor(3, 6, 4, 5)
    expected = theirs(input.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(module(input), expected)
    torch.testing.assert_close(fused(input, input), F.silu(expected + input))
    assert repr(fused) == repr(theirs).replace(name, f"{name}2d")[:-1] + ", activation='silu')"


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_add_norms(name: str, p: float) -> None:
    module, theirs = scrambled(getattr(ours, f"Add{name}")(5, dropout_p=p)), scrambled(getattr(nn, name)(5))
    module.load_state_dict(theirs.state_dict())
    assert repr(module) == f"Add{repr(theirs)[:-1]}, dropout_p={p})"
    input, residual = random_tensor(30, 5), random_tensor(30, 5, seed=1)
    output, sum = module.eval()(input, residual)
    torch.testing.assert_close((output, sum), (theirs(input + residual), input + residual))
    output, sum = module.train()(input, residual)
    assert bool((sum == residual).any()) == (p > 0)
    torch.testing.assert_close(output, theirs(sum))


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_bad_options(kind: Kind) -> None:
    with pytest.raises(TypeError, match="activation"):
        kind.make(activation="relu")
    with pytest.raises(ValueError, match=r"activation must be one of .*, but is 'tanh'"):
        kind.fused(activation="tanh")


@pytest.mark.parametrize("kind", [k for k in FUSED if k.name.startswith(("Batch", "Instance"))], ids=str)
def test_wrong_dimensions_are_torchs_error(kind: Kind) -> None:
    wrong = torch.ones(*kind.shape, 1, 1, 1)
    with pytest.raises(ValueError, match="expected") as theirs:
        kind.theirs()(wrong)
    with pytest.raises(ValueError, match="expected") as mine:
        kind.fused(activation="relu")(wrong)
    assert str(mine.value) == str(theirs.value)


def test_wrong_channels_of_instance_norm() -> None:
    wrong = random_tensor(2, 5, 3, 4)
    with pytest.raises(ValueError, match="5 channels in dimension 1, but num_features is 6"):
        ours.InstanceNorm2d(6, affine=True)(wrong)
    with pytest.warns(UserWarning, match="num_features is 6"):
        assert ours.InstanceNorm2d(6)(wrong).shape == wrong.shape


@pytest.mark.parametrize("kind", [k for k in FUSED if k.tracks], ids=str)
def test_one_value_per_channel(kind: Kind) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        kind.make()(torch.ones([1, 6, *[1] * (len(kind.shape) - 2)]))


# ---- what happens to modules -----------------------------------------------------------------------------------------


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved_whole(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_whole_and_loaded_safely(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    with torch.serialization.safe_globals([type(module)]):
        return torch.load(file, weights_only=True)


def saved_state(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(module)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def materialised(module: Any) -> Any:
    other = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    other.load_state_dict(module.state_dict())
    return other


def assigned(module: Any) -> Any:
    other = copy.deepcopy(module).to("meta")
    other.load_state_dict(module.state_dict(), assign=True)
    return other


COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    pickled,
    saved_whole,
    saved_whole_and_loaded_safely,
    saved_state,
    materialised,
    assigned,
]


@pytest.mark.parametrize("kind", FUSED, ids=str)
@pytest.mark.parametrize("copied", COPIES, ids=lambda function: function.__name__)
def test_copies_have_the_activation(kind: Kind, copied: Callable[[Any], Any]) -> None:
    module = scrambled(kind.fused(activation="leaky_relu", negative_slope=0.3))
    expected = scrambled(kind.theirs())
    other = copied(module)
    assert type(other) is type(module)
    assert repr(other) == repr(module)
    assert "activation='leaky_relu', negative_slope=0.3" in repr(other)
    for train in (True, False):
        other.train(train), expected.train(train)
        torch.testing.assert_close(other(kind.input()), F.leaky_relu(expected(kind.input()), 0.3))


@pytest.mark.parametrize("kind", FUSED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_moved_to_another_type(kind: Kind, dtype: torch.dtype) -> None:
    module = scrambled(kind.fused(activation="relu")).to(dtype)
    assert all(parameter.dtype == dtype for parameter in module.parameters())
    input = kind.input().to(dtype)
    output = module(input)
    assert output.dtype == dtype
    expected = scrambled(kind.theirs()).to(torch.float64)(input.double()).relu()
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [k for k in FUSED if "Frozen" not in k.name], ids=str)
def test_half_inputs_of_a_float_module(kind: Kind) -> None:
    module, input = scrambled(kind.fused(activation="relu")), kind.input().bfloat16()
    module(input).sum().backward() if list(module.parameters()) else module(input)
    assert module(input).dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_meta_device(kind: Kind) -> None:
    with torch.device("meta"):
        module = kind.fused(activation="relu")
    output = module(torch.empty(kind.shape, device="meta"))
    assert output.shape == kind.shape
    assert output.is_meta


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_functional_call(kind: Kind) -> None:
    module, expected = kind.fused(activation="relu"), scrambled(kind.theirs())
    state = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    actual = torch.func.functional_call(module, state, kind.input())
    torch.testing.assert_close(actual, expected(kind.input()).relu())
    torch.testing.assert_close(state, dict(expected.state_dict()))


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_hooks_see_what_comes_out_of_the_activation(kind: Kind) -> None:
    module, seen = kind.fused(activation="relu"), []
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    module.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0]))
    input = kind.input().requires_grad_()
    output = module(input)
    output.sum().backward()
    assert torch.equal(seen[0], input)
    assert torch.equal(seen[1], output)
    assert (seen[1] >= 0).all()
    assert torch.equal(seen[2], torch.ones_like(output))


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_parametrised_weight(kind: Kind) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module, expected = kind.fused(activation="relu"), kind.theirs()
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        pytest.skip("has none")
    for other in (module, expected):
        nn.utils.parametrize.register_parametrization(other, "weight", Doubled())
    torch.testing.assert_close(module(kind.input()), expected(kind.input()).relu())


@pytest.mark.parametrize("kind", FUSED, ids=str)
def test_trace_and_compile(kind: Kind) -> None:
    module = scrambled(kind.fused(activation="relu")).eval()
    expected = scrambled(kind.theirs()).eval()(kind.input()).relu()
    torch.testing.assert_close(torch.jit.trace(module, kind.input())(kind.input()), expected)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(kind.input()), expected)
    torch.testing.assert_close(torch.export.export(module, (kind.input(),)).module()(kind.input()), expected)


def test_old_checkpoints_without_num_batches_tracked() -> None:
    state = nn.BatchNorm2d(6).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    module = ours.BatchNorm2d(6)
    assert not module.load_state_dict(state).missing_keys
    assert module.num_batches_tracked == 0


def test_frozen_batch_norm_loads_a_batch_norm() -> None:
    theirs = scrambled(nn.BatchNorm2d(6)).eval()
    module = ours.FrozenBatchNormAct2d(6)
    module.load_state_dict(theirs.state_dict())
    input = random_tensor(2, 6, 3, 4)
    for train in (True, False):
        torch.testing.assert_close(module.train(train)(input), theirs(input).relu())
    assert not list(module.parameters())


def test_frozen_batch_norm_without_torchvision() -> None:
    pytest.importorskip("torchvision")
    module = ours.FrozenBatchNorm2d(6, 1e-3)
    file = io.BytesIO()
    pickle.dump(module, file)
    printed = run_python(
        f"""
import io, pickle, sys, torch
sys.modules["torchvision"] = None
import myvision.nn
loaded = pickle.loads({file.getvalue()!r})
assert "_FrozenBatchNorm2d" in [base.__name__ for base in type(loaded).__mro__]
made = myvision.nn.FrozenBatchNorm2d(6, 1e-3)
assert made.state_dict().keys() == loaded.state_dict().keys()
assert made.__dict__.keys() == loaded.__dict__.keys()
made.load_state_dict(torch.nn.BatchNorm2d(6).state_dict())
assert not list(made.parameters())
x = torch.randn(2, 6, 3, 4)
assert torch.equal(made(x), loaded(x))
print(repr(made))
"""
    )
    assert printed.strip() == repr(module)


def test_modules_without_torchvision_do_not_import_it() -> None:
    run_python("import sys, myvision.nn; myvision.nn.BatchNorm2d(3); assert 'torchvision' not in sys.modules")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kind", [k for k in FUSED if "Sync" not in k.name] + [VARIANTS[0], VARIANTS[10], VARIANTS[12]], ids=str
)
def test_script(kind: Kind, fused: bool) -> None:
    """As torch's modules are scripted, through the operators; in both modes, with the buffers that they move."""
    module = scrambled(kind.fused(activation="silu") if fused else kind.make())
    scripted = torch.jit.script(copy.deepcopy(module))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    scripted = torch.jit.load(file)
    for train in (True, False):
        module.train(train), scripted.train(train)
        for given in ((kind.input(),), (kind.input(), kind.input(1))):
            torch.testing.assert_close(scripted(*given), module(*given), rtol=0, atol=0)
    torch.testing.assert_close(dict(scripted.state_dict()), dict(module.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*PLAIN, *VARIANTS], ids=str)
def test_a_module_of_torch_becomes_ours_by_its_class(kind: Kind) -> None:
    theirs = scrambled(kind.theirs())
    module, fused = copy.deepcopy(theirs), copy.deepcopy(theirs)
    module.__class__ = type(kind.make())
    fused.__class__ = type(kind.fused())
    for train in (True, False):
        for other in (module, fused, theirs):
            other.train(train)
        expected = theirs(kind.input())
        torch.testing.assert_close(module(kind.input()), expected)
        torch.testing.assert_close(fused(kind.input()), expected.relu())


@pytest.mark.filterwarnings("ignore:input has 5 channels:UserWarning")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", ["BatchNorm2d", "BatchNormAct2d", "SyncBatchNorm", "InstanceNorm2d"])
def test_a_call_that_fails_moves_no_statistics(name: str, momentum: float | None) -> None:
    module = getattr(ours, name)(6, momentum=momentum, track_running_stats=True)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    x = random_tensor(3, 6, 4, 5)
    wrong: list[tuple[Tensor, ...]] = [(x[0, 0],), (x[:, :5],), (x.double(), x.float()), (x, x[:1]), (x.int(),)]
    for given in wrong:
        with pytest.raises((RuntimeError, ValueError)):
            module(*given)
    if name != "InstanceNorm2d":
        with pytest.raises(ValueError, match="more than 1 value"):
            module(x[:1, :, :1, :1])
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_rms_norm_are_torchs(dtype: torch.dtype, other: torch.dtype) -> None:
    module, theirs = (scrambled(package.RMSNorm(6)).to(dtype) for package in (ours, nn))
    x = random_tensor(4, 6).to(other)
    output, expected = module(x), theirs(x)
    assert output.dtype == expected.dtype == other
    oracle = F.rms_norm(x.double(), (6,), theirs.weight.double(), torch.finfo(torch.float32).eps)
    tolerance = 4 * torch.finfo(other).eps
    torch.testing.assert_close(output.double(), oracle, rtol=tolerance, atol=tolerance)
    output.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(module.weight.grad, theirs.weight.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("buffers", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_frozen_batch_norm_are_torchvisions(dtype: torch.dtype, buffers: torch.dtype) -> None:
    theirs = scrambled(pytest.importorskip("torchvision").ops.FrozenBatchNorm2d(6)).to(buffers)
    module, fused = ours.FrozenBatchNorm2d(6).to(buffers), ours.FrozenBatchNormAct2d(6).to(buffers)
    x = random_tensor(2, 6, 3, 4).to(dtype)
    for other in (module, fused):
        other.load_state_dict(theirs.state_dict())
        assert other(x).dtype == theirs(x).dtype
        assert other(x, x.double()).dtype == torch.float64
    oracle = copy.deepcopy(theirs).double()(x.double())
    tolerance = 4 * torch.finfo(module(x).dtype).eps
    torch.testing.assert_close(module(x).double(), oracle, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fused(x).double(), oracle.relu(), rtol=tolerance, atol=tolerance)


# ---- utilities of torch that know batch norms ------------------------------------------------------------------------


def model(activation: str | None) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        scrambled(ours.BatchNormAct2d(6, activation=activation) if activation else ours.BatchNorm2d(6)),
    )


def test_update_bn() -> None:
    batches = [random_tensor(4, 3, 8, 8, seed=seed) for seed in range(3)]
    module, theirs = model(None), nn.Sequential(model(None)[0], nn.BatchNorm2d(6))
    for other in (module, theirs):
        torch.optim.swa_utils.update_bn(batches, other)
    for name, tensor in theirs[1].named_buffers():
        torch.testing.assert_close(module[1].get_buffer(name), tensor)
    assert module[1].momentum == 0.1


def test_momentum_none_is_the_mean_of_all_batches() -> None:
    module = ours.BatchNormAct1d(6, momentum=None).double()
    batches = [random_tensor(8, 6, dtype=torch.float64, seed=seed) for seed in range(5)]
    for batch in batches:
        module(batch)
    torch.testing.assert_close(module.running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    torch.testing.assert_close(module.running_var, torch.stack([b.var(0) for b in batches]).mean(0))
    before = module.running_mean.clone()
    module(torch.empty(0, 6, dtype=torch.float64))
    assert torch.equal(module.running_mean, before)


def test_our_convert_sync_batchnorm_keeps_the_activation() -> None:
    module = nn.ModuleDict(
        {"ours": model("silu"), "theirs": nn.BatchNorm1d(6, affine=False), "linear": nn.Linear(2, 2)}
    )
    module["ours"][1].eval()
    expected = module["ours"][1]
    converted = ours.SyncBatchNorm.convert_sync_batchnorm(module)
    assert converted is module
    sync = module["ours"][1]
    assert (type(sync), type(module["theirs"])) == (ours.SyncBatchNormAct, ours.SyncBatchNorm)
    assert (sync.activation, sync.training) == ("silu", False)
    assert sync.weight is expected.weight
    assert sync.running_mean is expected.running_mean
    assert isinstance(module["theirs"], nn.SyncBatchNorm)
    assert not isinstance(sync, nn.modules.batchnorm._BatchNorm)
    assert module["theirs"].weight is None
    x = random_tensor(2, 6, 4, 4)
    torch.testing.assert_close(sync(x), expected(x))
    alone = ours.SyncBatchNorm.convert_sync_batchnorm(ours.BatchNorm2d(6, momentum=None, bias=False))
    assert (alone.bias, alone.momentum) == (None, None)
    again = ours.SyncBatchNorm.convert_sync_batchnorm(sync)
    assert (type(again), again.activation) == (ours.SyncBatchNormAct, "silu")


def test_torchs_convert_sync_batchnorm() -> None:
    x = random_tensor(2, 3, 6, 6)
    for module in (model("relu").eval(), model(None).eval()):
        expected = module(x)
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        torch.testing.assert_close(converted(x), expected)


def test_fusing_a_convolution() -> None:
    plain, x = model(None).eval(), random_tensor(2, 3, 7, 7)
    torch.testing.assert_close(fusion.fuse_conv_bn_eval(*plain)(x), plain(x))


def test_fusing_for_quantisation() -> None:
    for names in (["0", "1"], [["0", "1"]]):
        with pytest.raises(AssertionError, match="did not find fuser method"):
            torch.ao.quantization.fuse_modules(model("relu").eval(), names)
    with pytest.raises(AssertionError, match="did not find fuser method"):
        torch.ao.quantization.fuse_modules_qat(model("relu").train(), ["0", "1"])


def test_fusing_in_fx() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return not isinstance(module, nn.Sequential)

    module, x = model("relu").eval(), random_tensor(2, 3, 7, 7)
    traced = torch.fx.GraphModule(module, Tracer().trace(module))
    fused = optimization.fuse(traced, no_trace=True)
    torch.testing.assert_close(fused(x), module(x))


def test_mkldnn() -> None:
    module, x = model("relu").eval(), random_tensor(2, 3, 7, 7)
    expected = module(x)
    assert type(torch.utils.mkldnn.to_mkldnn(module)[1]) is ours.BatchNormAct2d
    torch.testing.assert_close(module[1](module[0](x)), expected)


def test_fast_path_of_the_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.norm1 = ours.LayerNorm(8)
    theirs = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    theirs.load_state_dict(layer.state_dict())
    x = random_tensor(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), theirs(x))
    torch.testing.assert_close(layer(x), theirs(x))


def test_replaced_batch_norms_of_functorch() -> None:
    module = model(None)
    torch.func.replace_all_batch_norm_modules_(module)
    x = random_tensor(4, 3, 7, 7)
    expected = F.batch_norm(module[0](x), None, None, module[1].weight, module[1].bias, True)
    torch.testing.assert_close(module(x), expected)


def test_eps_can_be_read_and_set() -> None:
    module = ours.BatchNormAct2d(6, eps=1e-3)
    assert module.eps == 1e-3
    module.eps = 0.5
    assert module.eps == 0.5
    assert "eps=0.5" in repr(module)
    x = random_tensor(2, 6, 3, 4)
    torch.testing.assert_close(module(x), nn.BatchNorm2d(6, eps=0.5)(x).relu())
