"""Linear and LinearAct: torch's module in every respect, and one with an activation, which nothing drops."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor
from norm_cases import ACTIVATIONS
from torch import Tensor, nn
from torch.nn.utils import prune

from myvision._formulas._activation import activate
from myvision.nn import Linear, LinearAct

BIAS = pytest.mark.parametrize("bias", [True, False])


def pair(bias: bool = True, **options: Any) -> tuple[Any, nn.Linear]:
    """Ours, with an activation where there are options, and torch's, of the same parameters."""
    theirs = nn.Linear(5, 7, bias)
    module = LinearAct(5, 7, bias, **options) if options else Linear(5, 7, bias)
    module.load_state_dict(theirs.state_dict())
    return module, theirs


def step(module: nn.Module, input: Tensor) -> list[Tensor]:
    """The output, and the gradients of a step of training."""
    leaf = input.clone().requires_grad_()
    output = module(leaf)
    output.pow(3).sum().backward()
    return [output, leaf.grad, *[parameter.grad for parameter in module.parameters()]]


@BIAS
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4, 5)], ids=str)
def test_is_torchs_module(bias: bool, shape: tuple[int, ...]) -> None:
    module, theirs = pair(bias)
    assert isinstance(module, nn.Linear)
    assert inspect.signature(Linear) == inspect.signature(nn.Linear)
    assert repr(module) == repr(theirs)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert module.__dict__.keys() == theirs.__dict__.keys()
    torch.testing.assert_close(step(module, random_tensor(*shape)), step(theirs, random_tensor(*shape)))


@BIAS
@pytest.mark.parametrize("make", [Linear, LinearAct])
def test_starts_with_torchs_parameters(make: Callable[..., nn.Module], bias: bool) -> None:
    states = []
    for module in (make, nn.Linear):
        torch.manual_seed(3)
        states.append(dict(module(5, 7, bias, dtype=torch.float64).state_dict()))
    torch.testing.assert_close(*states, rtol=0, atol=0)


@BIAS
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_with_an_activation(activation: str | None, bias: bool) -> None:
    module, theirs = pair(bias, activation=activation, negative_slope=0.3)
    assert not isinstance(module, nn.Linear)  # whatever knows torch's would lose the activation
    input, residual = random_tensor(4, 5), random_tensor(4, 7)
    expected = activate(theirs(input), activation, 0.3)
    torch.testing.assert_close(module(input), expected)
    torch.testing.assert_close(module(input, residual), expected + residual)
    slope = ", negative_slope=0.3" if activation == "leaky_relu" else ""
    named = f", activation={activation!r}{slope}" if activation else ""
    assert repr(module) == repr(theirs).replace("Linear", "LinearAct")[:-1] + named + ")"


def test_defaults_of_the_activation() -> None:
    module, input = LinearAct(5, 7), random_tensor(4, 5)
    torch.testing.assert_close(module(input), F.linear(input, module.weight, module.bias).relu())
    assert (module.negative_slope, module.dropout_p) == (0.01, 0.0)


def test_dropout_in_training_only() -> None:
    module, theirs = pair(activation="silu", dropout_p=0.25)
    assert repr(module).endswith(", activation='silu', dropout_p=0.25)")
    input, residual = random_tensor(300, 5), random_tensor(300, 7, seed=1)
    hidden = F.silu(theirs(input))
    torch.testing.assert_close(module.eval()(input, residual), hidden + residual)
    output = module.train()(input, residual)
    dropped = output == residual
    assert 0.15 < dropped.double().mean() < 0.35
    torch.testing.assert_close(output, residual + hidden / 0.75 * ~dropped)


def test_bad_options() -> None:
    with pytest.raises(TypeError, match="activation"):
        Linear(5, 7, activation="relu")
    with pytest.raises(ValueError, match=r"activation must be one of .*, but is 'tanh'"):
        LinearAct(5, 7, activation="tanh")
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"dropout_p must be between 0 and 1, but is {p}"):
            LinearAct(5, 7, dropout_p=p)


# ---- what happens to modules -----------------------------------------------------------------------------------------


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved_whole(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    with torch.serialization.safe_globals([type(module)]):
        return torch.load(file, weights_only=True)


def materialised(module: Any) -> Any:
    other = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, saved_whole, materialised])
def test_copies_have_the_activation(copied: Callable[[Any], Any]) -> None:
    module = LinearAct(5, 7, activation="leaky_relu", negative_slope=0.3, dropout_p=0.5)
    other = copied(module)
    assert type(other) is LinearAct
    assert repr(other) == repr(module)
    torch.testing.assert_close(other.eval()(random_tensor(4, 5)), module.eval()(random_tensor(4, 5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_moved_to_another_type(dtype: torch.dtype) -> None:
    module, theirs = pair(activation="relu")
    output, expected = module.to(dtype)(random_tensor(4, 5).to(dtype)), theirs.to(dtype)(random_tensor(4, 5).to(dtype))
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected.relu(), rtol=tolerance, atol=tolerance)


def test_meta_device() -> None:
    with torch.device("meta"):
        module = LinearAct(5, 7)
    output = module(torch.empty(4, 5, device="meta"))
    assert (output.shape, output.is_meta) == ((4, 7), True)


def test_a_module_of_torch_becomes_ours_by_its_class() -> None:
    theirs, input = nn.Linear(5, 7), random_tensor(4, 5)
    module, fused = copy.deepcopy(theirs), copy.deepcopy(theirs)
    module.__class__, fused.__class__ = Linear, LinearAct
    torch.testing.assert_close(module(input), theirs(input))
    torch.testing.assert_close(fused(input), theirs(input).relu())


def test_parametrised_and_pruned_weight() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module, theirs = pair(activation="relu")
    for other in (module, theirs):
        nn.utils.parametrize.register_parametrization(other, "weight", Doubled())
        prune.l1_unstructured(other, "bias", 3)
    torch.testing.assert_close(module(random_tensor(4, 5)), theirs(random_tensor(4, 5)).relu())
    assert int((module.bias == 0).sum()) == 3


def test_functional_call() -> None:
    module, theirs = pair(activation="relu")
    state = {name: 2 * tensor for name, tensor in theirs.state_dict().items()}
    actual = torch.func.functional_call(module, state, random_tensor(4, 5))
    torch.testing.assert_close(actual, (2 * theirs(random_tensor(4, 5))).relu())


def test_hooks_see_what_comes_out_of_the_activation() -> None:
    module, seen = LinearAct(5, 7), []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    module.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0]))
    output = module(random_tensor(4, 5).requires_grad_())
    output.sum().backward()
    assert torch.equal(seen[0], output)
    assert (seen[0] >= 0).all()
    assert torch.equal(seen[1], torch.ones_like(output))


def test_in_torchs_encoder() -> None:
    """Whose fast path reads the parameters past the module's call."""
    layer, theirs = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval() for _ in range(2))
    layer.linear1.__class__ = layer.linear2.__class__ = Linear
    layer.load_state_dict(theirs.state_dict())
    x = random_tensor(2, 3, 8)
    torch.testing.assert_close(layer(x), theirs(x))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), theirs(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@BIAS
@pytest.mark.parametrize(
    "options", [{}, {"activation": "gelu"}, {"activation": "leaky_relu", "dropout_p": 0.5}], ids=str
)
def test_script(options: dict[str, Any], bias: bool) -> None:
    """As torch's module is scripted, through the operator; in both modes, with the same numbers of dropout."""
    module = pair(bias, **options)[0]
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(copy.deepcopy(module)), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    for train in (True, False):
        module.train(train), scripted.train(train)
        for given in ((random_tensor(4, 5),), (random_tensor(4, 5), random_tensor(4, 7))):
            outputs = []
            for other in (scripted, module):
                torch.manual_seed(1)
                outputs.append(other(*given))
            torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_trace() -> None:
    module = LinearAct(5, 7, dropout_p=0.5).eval()
    traced = torch.jit.trace(module, random_tensor(4, 5))
    torch.testing.assert_close(traced(random_tensor(6, 5)), module(random_tensor(6, 5)))
