"""What converting a model leaves as it is: results, gradients, state, hooks, copies; and where it does nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import operators_run, random_tensor
from torch import Tensor, nn

import myvision.nn
from myvision._convert import convert
from myvision._convert.replace import replacements

torchvision = pytest.importorskip("torchvision")


class Block(nn.Module):
    """As in residual networks: one activation module, called twice, and an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)


def operators(call: Callable[[], object]) -> dict[str, int]:
    """How often each of the operators ran, torch's that norms take in among them."""
    with torch.profiler.profile() as profile:
        call()
    names = ("myvision::batch_norm", "myvision::layer_norm", "aten::add", "aten::add_", "aten::relu", "aten::relu_")
    return {event.key: event.count for event in profile.key_averages() if event.key in names}


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    theirs = build().double()
    for buffer in theirs.buffers():  # statistics that are not those of a fresh network
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    return convert(copy.deepcopy(theirs)), theirs


def assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Results, gradients and the state after a training step; results in evaluation."""
    for model in (ours, theirs):
        model.train()
        model.zero_grad()
    actual, expected = (model(x.clone()) for model in (ours, theirs))
    torch.testing.assert_close(actual, expected)
    for output in (actual, expected):
        output.square().mean().backward()
    ours_grads, theirs_grads = ({n: p.grad for n, p in m.named_parameters()} for m in (ours, theirs))
    torch.testing.assert_close(ours_grads, theirs_grads)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x.clone()), theirs.eval()(x.clone()))


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "convnext_tiny",
        pytest.param("mobilenet_v3_small", marks=pytest.mark.exhaustive),
        pytest.param("densenet121", marks=pytest.mark.exhaustive),
        pytest.param("shufflenet_v2_x0_5", marks=pytest.mark.exhaustive),
        pytest.param("efficientnet_b0", marks=pytest.mark.exhaustive),
        pytest.param("swin_t", marks=pytest.mark.exhaustive),
    ],
)
def test_networks_compute_the_same(name: str) -> None:
    ours, theirs = both(lambda: torchvision.models.get_model(name, num_classes=10))
    for model in (ours, theirs):  # whatever is random is left out
        for module in model.modules():
            if isinstance(module, (nn.Dropout, torchvision.ops.StochasticDepth)):
                module.p = 0.0
    assert_same(ours, theirs, random_tensor(2, 3, 64, 64, dtype=torch.float64))
    assert sum(type(module).__module__.startswith("myvision") for module in ours.modules()) > 10


def test_a_norm_takes_in_what_follows_it() -> None:
    ours, theirs = both(Block)
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64)
    assert_same(ours, theirs, x)  # which ends in evaluation
    assert operators(lambda: ours(x)) == {"myvision::batch_norm": 3}


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.LeakyReLU(0.3), "leaky_relu"),
        (nn.SiLU(inplace=True), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.Hardswish(), "hardswish"),
    ],
)
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(4),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.InstanceNorm2d(4),
        lambda: nn.LayerNorm([6, 6]),
        lambda: nn.RMSNorm([6, 6]),
        lambda: torchvision.ops.FrozenBatchNorm2d(4),
    ],
)
def test_every_norm_and_activation(norm: Callable[[], nn.Module], activation: nn.Module, name: str) -> None:
    ours, theirs = both(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), norm(), copy.deepcopy(activation)))
    assert_same(ours, theirs, random_tensor(2, 4, 6, 6, dtype=torch.float64))
    seen = []
    original = type(ours[1]).fused

    def fused(self: nn.Module, *args: object) -> Tensor:
        seen.append(args[2])
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ours[1]), "fused", fused)
        ours(random_tensor(2, 4, 6, 6, dtype=torch.float64))
    assert seen == [name]


class Unlike(nn.Module):
    """A sum of a shape, or of a dtype, of its own."""

    def __init__(self, other: Tensor) -> None:
        super().__init__()
        self.bn, self.other = nn.BatchNorm2d(4), other

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(x) + self.other)


@pytest.mark.parametrize("other", [random_tensor(2, 4, 6, 6), random_tensor(4, 1, 1, dtype=torch.float64)])
def test_what_is_added_may_be_unlike_the_input(other: Tensor) -> None:
    assert_same(*both(lambda: Unlike(other)), random_tensor(2, 4, 6, 6, dtype=torch.float64))


# ---- linear layers -------------------------------------------------------------------------------------------------


def mlp(activation: nn.Module, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), copy.deepcopy(activation), nn.Dropout(dropout), nn.Linear(6, 4), nn.Dropout(dropout)
    )


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.3),
        nn.SiLU(),
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        nn.Hardswish(),
    ],
)
def test_a_linear_layer_takes_in_what_follows_it(activation: nn.Module) -> None:
    ours, theirs = both(lambda: mlp(activation))
    x = random_tensor(3, 5, 4, dtype=torch.float64)
    assert_same(ours, theirs, x)
    for training in (True, False):
        assert operators_run(ours.train(training), x) == ["myvision.linear"] * 2


def test_a_linear_layer_takes_in_dropout() -> None:
    model = convert(mlp(nn.ReLU(), dropout=0.25))
    with torch.no_grad():
        for layer, bias in ((model[0], 1.0), (model[3], 0.0)):
            layer.weight.fill_(1 / 4), layer.bias.fill_(bias)
    x = torch.zeros(2000, 4)
    torch.manual_seed(0)
    assert operators_run(model, x) == ["myvision.linear"] * 2
    output = model(x)  # (kept of 6) / 3, each kept with probability 0.75; then dropped again
    assert output.count_nonzero() / output.numel() == pytest.approx(0.75, abs=0.03)
    assert output.mean().item() == pytest.approx(1.5, abs=0.05)
    torch.testing.assert_close(model.eval()(x), torch.full((2000, 4), 1.5))
    model[2].p = model[4].p = 0.0
    torch.testing.assert_close(model.train()(x), torch.full((2000, 4), 1.5))


class Residual(nn.Module):
    """As a block of many networks: its activations are functions, and it adds what went past."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


def test_a_linear_layer_takes_in_an_addition() -> None:
    ours, theirs = both(Residual)
    x = random_tensor(3, 4, dtype=torch.float64)
    assert_same(ours, theirs, x)
    assert operators_run(ours, x) == ["myvision.linear"] * 2
    with torch.autocast("cpu", torch.bfloat16):  # the sum keeps the dtype of what is added
        x = x.float()
        assert ours.float()(x).dtype == theirs.float()(x).dtype == torch.float32


def test_converted_linear_layers_are_copied_compiled_and_exported() -> None:
    ours, _ = both(lambda: mlp(nn.GELU()))
    x = random_tensor(3, 4, dtype=torch.float64)
    expected = ours.eval()(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert operators_run(other, x) == ["myvision.linear"] * 2
        torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(x), expected)
    graph = torch.export.export(ours, (x,)).graph
    assert sum(node.op == "call_function" for node in graph.nodes) == 2


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + x[:1]


class ActivatedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return F.relu(y) + F.gelu(y, approximate="tanh")


@pytest.mark.parametrize("build", [Broadcast, ActivatedTwice])
def test_linear_layers_where_not_all_can_be_taken_in(build: type[nn.Module]) -> None:
    assert_same(*both(build), random_tensor(3, 4, dtype=torch.float64))


def test_linear_layers_of_other_classes_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = convert(nn.Sequential(Own(4, 4), nn.ReLU()))
    assert [type(part) for part in (model, model[0])] == [nn.Sequential, Own]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.utils.parametrizations.weight_norm(model[0])
    x = torch.rand(3, 4)
    expected = model(x)
    assert torch.equal(convert(model)(x), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_linear_layers_that_change_after_the_conversion() -> None:
    """A hook sees what the layer alone gives; a weight that is parametrized or of another kind is what counts."""
    x = random_tensor(3, 4, dtype=torch.float64)
    ours, theirs = both(lambda: mlp(nn.GELU()))
    seen: list[list[Tensor]] = [[], []]
    for model, kept in ((ours, seen[0]), (theirs, seen[1])):
        for part in (model[0], model[1]):
            part.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output.clone()))
    assert_same(ours, theirs, x)
    assert len(seen[0]) == 4
    torch.testing.assert_close(*seen)
    ours, theirs = both(lambda: mlp(nn.GELU()))
    for model in (ours, theirs):
        torch.manual_seed(0)
        nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    assert_same(ours, theirs, x)
    sparse = convert(nn.Sequential(nn.Linear(4, 6), nn.ReLU())).double()
    expected = sparse(x)
    sparse[0].weight = nn.Parameter(sparse[0].weight.detach().to_sparse_csr(), requires_grad=False)
    torch.testing.assert_close(sparse(x), expected)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


# ---- evaluation writes over what no one else reads -------------------------------------------------------------------


def in_place(call: Callable[[], object]) -> int:
    """How many norms wrote over their input."""
    with torch.profiler.profile() as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "myvision::_batch_norm_in_place")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_evaluation_takes_the_memory_of_a_convolution(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    theirs = Block().to(dtype).to(memory_format=memory_format).eval()
    theirs.bn1.running_mean.uniform_()
    ours = convert(copy.deepcopy(theirs))
    x = random_tensor(2, 4, 6, 6, dtype=dtype).to(memory_format=memory_format)
    with torch.no_grad():
        before = x.clone()
        torch.testing.assert_close(ours(x), theirs(x))
        assert torch.equal(x, before)
        assert in_place(lambda: ours(x)) == 3
    with torch.inference_mode():
        assert in_place(lambda: ours(x)) == 3
    assert in_place(lambda: ours(x)) == 0  # gradients may be asked for
    with torch.no_grad():
        assert in_place(lambda: ours.train()(x)) == 0


def test_a_convolution_that_is_watched_keeps_its_output() -> None:
    ours, _ = both(Block)
    ours.eval()
    kept = []
    ours.conv1.register_forward_hook(lambda module, args, output: kept.append((output, output.clone())))
    with torch.no_grad():
        ours(random_tensor(2, 4, 6, 6, dtype=torch.float64))
    ((output, before),) = kept
    assert torch.equal(output, before)


def test_a_mode_that_keeps_results_sees_them_unchanged() -> None:
    class Keep(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.convolution.default:
                kept.append((result, result.clone()))
            return result

    ours, _ = both(Block)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), Keep():
        ours.eval()(random_tensor(2, 4, 6, 6, dtype=torch.float64))
    assert len(kept) == 3
    assert all(torch.equal(output, before) for output, before in kept)


class Given(Norm):
    """The norm reads what came from outside, or what is read again."""

    def __init__(self, reads_again: bool) -> None:
        super().__init__()
        self.conv, self.reads_again = nn.Conv2d(4, 4, 1), reads_again

    def forward(self, x: Tensor) -> Tensor:
        if not self.reads_again:
            return F.relu(self.bn(x))
        y = self.conv(x)
        return F.relu(self.bn(y)) + y


@pytest.mark.parametrize("reads_again", [False, True])
def test_what_others_read_is_not_written_to(reads_again: bool) -> None:
    ours, theirs = both(lambda: Given(reads_again))
    assert type(ours) is not Given
    with torch.no_grad():
        assert in_place(lambda: ours.eval()(random_tensor(2, 4, 6, 6, dtype=torch.float64))) == 0
    assert_same_results(ours, theirs)


def test_transforms_and_exports_see_no_writing() -> None:
    ours, theirs = both(Block)
    x = random_tensor(3, 2, 4, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(ours.eval())(x), torch.func.vmap(theirs.eval())(x))
        program = torch.export.export(ours, (x[0],))
    assert not any("in_place" in str(node.target) for node in program.graph.nodes)


def test_compiled_evaluation_writes_in_place() -> None:
    ours, theirs = both(Block)
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        compiled = torch.compile(ours.eval(), fullgraph=True)
        torch.testing.assert_close(compiled(x), theirs.eval()(x))
        assert in_place(lambda: compiled(x)) == 3


# ---- where nothing may be fused --------------------------------------------------------------------------------------


class ReadTwice(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        return F.relu(y) + y


class CalledTwice(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(F.relu(self.bn(x))))


class AddedInto(Norm):
    def forward(self, x: Tensor) -> Tensor:
        total = x.clone()
        total += self.bn(x)
        return F.relu(total)


class WrittenBetween(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.bn(x)
        return F.relu(y + x.mul_(3))


class WritesItsInput(Norm):
    def forward(self, x: Tensor) -> Tensor:
        before = x
        x += F.relu(self.bn(x))
        return x + before


class Counts(Norm):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return F.relu(self.bn(x)) * self.calls


class KeepsSomething(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(x))
        self.last = y
        return y


class ByGradientMode(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(x))
        return y if torch.is_grad_enabled() else -y


class ViewWrittenBetween(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        view = x[0]
        y = self.bn(x)
        view.mul_(3)
        return F.relu(y + x)


class Scaled(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.add(self.bn(x), x, alpha=2))


class ByMode(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        return F.relu(y) if self.training else F.relu(-y)


class Option(Norm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.bn(x)
        return F.relu(y) if residual is None else F.relu(y + residual)


UNPROVEN = [
    ReadTwice,
    CalledTwice,
    AddedInto,
    WrittenBetween,
    ViewWrittenBetween,
    Scaled,
    ByMode,
    ByGradientMode,
    Option,
    Counts,
    KeepsSomething,
]


@pytest.mark.parametrize("build", UNPROVEN)
def test_what_is_not_proven_stays(build: type[nn.Module]) -> None:
    ours, theirs = both(build)
    assert type(ours) is build
    assert type(ours.bn) is myvision.nn.BatchNorm2d
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    assert_same_results(ours, theirs)


def assert_same_results(ours: nn.Module, theirs: nn.Module) -> None:
    """In both modes, with what a call did to its input."""
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64)
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                actual, expected = x.clone(), x.clone()
                results = [model.train(training)(t) for model, t in ((ours, actual), (theirs, expected))]
            torch.testing.assert_close(results[0], results[1])
            torch.testing.assert_close(actual, expected)


def test_what_is_written_to_an_input_is_written() -> None:
    ours, theirs = both(WritesItsInput)
    assert type(ours) is not WritesItsInput
    assert_same_results(ours, theirs)


def test_a_norm_of_two_modules_stays() -> None:
    shared = nn.BatchNorm2d(4)
    model = convert(nn.ModuleList([nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.ReLU())]))
    assert type(model[0]) is nn.Sequential


def test_subclasses_are_left_alone() -> None:
    class Own(nn.BatchNorm2d):
        pass

    model = convert(nn.Sequential(Own(4), nn.ReLU()))
    assert type(model[0]) is Own
    assert type(model) is nn.Sequential


# ---- what happens to a converted model afterwards --------------------------------------------------------------------


def test_hooks_are_called_with_what_they_always_got() -> None:
    ours, theirs = both(Block)
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64)
    seen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for name, model in (("ours", ours), ("theirs", theirs)):
        model.bn2.register_forward_hook(lambda module, args, output, name=name: seen[name].append(output.clone()))
        model(x)
    torch.testing.assert_close(seen["ours"], seen["theirs"])


def test_another_module_in_its_place_is_called() -> None:
    ours, theirs = both(Block)
    for model in (ours, theirs):
        model.bn2 = nn.Identity()
    assert_same(ours, theirs, random_tensor(2, 4, 6, 6, dtype=torch.float64))


def test_a_part_of_a_sequence_is_what_it_was() -> None:
    ours, theirs = both(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)))
    for part in (slice(2), slice(1, 3), slice(2, None)):
        assert_same_results(ours[part], theirs[part])
    for change in (lambda m: m.append(nn.Conv2d(4, 4, 1, bias=False)), lambda m: m.__delitem__(2), lambda m: m.pop(1)):
        for model in (ours, theirs):
            torch.manual_seed(0)
            change(model)
            model.double()
        assert_same_results(ours, theirs)


def test_copies_and_pickles_are_fused_too() -> None:
    ours, _ = both(Block)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64)
    ours.eval()
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False).eval()):
        assert isinstance(other, Block)
        assert operators(lambda other=other: other(x)) == {"myvision::batch_norm": 3}
        torch.testing.assert_close(other(x), ours(x))


def test_a_converted_model_compiles_and_traces() -> None:
    ours, theirs = both(Block)
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64)
    expected = theirs.eval()(x)
    compiled = torch.compile(ours.eval(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x), expected)
    torch.testing.assert_close(torch.jit.trace(ours, x)(x), expected)
    torch.testing.assert_close(torch.export.export(ours, (x,)).module()(x), expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_are_laid_out_as_before(memory_format: torch.memory_format) -> None:
    """What follows a norm in the network is as fast as its layout lets it be."""
    norm = torchvision.models.convnext.LayerNorm2d
    ours, theirs = both(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), norm(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    x = random_tensor(2, 4, 6, 6, dtype=torch.float64).to(memory_format=memory_format)
    for layers in range(1, 5):
        assert ours[:layers](x).stride() == theirs[:layers](x).stride()
    assert_same(ours, theirs, x)


def test_every_class_stands_in_for_one_that_it_is() -> None:
    """But for the norm over channels, which torchvision has as a subclass of the one over the last dimensions."""
    for theirs, ours in replacements().items():
        assert issubclass(ours, theirs) or theirs is torchvision.models.convnext.LayerNorm2d
