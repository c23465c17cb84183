"""Whole networks beside themselves with our modules put in: `python -m myvision bench --networks`.

Random weights, random images. A network is timed as it is and with ours in one run, in evaluation and in a training
step; torch's profiler then tells, for each shape, how long the normalisations take together with the additions and
activations around them, as these are what ours takes in, and the linear layers with the activations behind them.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from myvision._convert import convert

from .harness import EAGER, OURS, Bar, Case, Function, Limits, Result, Settings, TimeCase

PROFILED_STEPS = 7  # of each, in turns
CLASSES = 1000


class DeformableConv2d(nn.Module):
    """torchvision's deformable convolution with a convolution that predicts its offsets and mask, as detectors have."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        from torchvision.ops import DeformConv2d

        stride: Any = conv.stride
        self.predict = nn.Conv2d(conv.in_channels, 27, 3, stride, 1)
        self.conv = DeformConv2d(conv.in_channels, conv.out_channels, 3, stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        offset, mask = self.predict(x).split([18, 9], 1)
        return self.conv(x, offset, mask.sigmoid())


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name)


def deformable_resnet() -> nn.Module:
    """A ResNet-50 with deformable convolutions in its last three stages."""
    model: Any = torchvision_model("resnet50")
    for block in (*model.layer2, *model.layer3, *model.layer4):
        block.conv2 = DeformableConv2d(block.conv2)
    return model


class Pronouncer(nn.Module):
    """The Transformer of examples/transformer_g2p.py, between embeddings of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(128, 4, 3, 3, 512, dropout=0.1, batch_first=True, norm_first=True)
        self.classify = nn.Linear(128, CLASSES)

    def forward(self, letters: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(letters.shape[1], letters.device)
        spoken = self.transformer(letters, letters, tgt_mask=causal, tgt_is_causal=True)
        return self.classify(spoken.mean(1))


@dataclass(frozen=True)
class Network:
    """One network, what it gets, and whether it is laid out by channels_last.

    It is not profiled where our norms take in dropout as well, whose time the events do not tell from other dropout's.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 224, 224)
    channels_last: bool = False
    profiled: bool = True

    def input(self, batch: int, device: torch.device) -> Tensor:
        x = torch.randn(batch, *self.shape, device=device)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x

    def models(self, training: bool, device: torch.device) -> dict[str, nn.Module]:
        """Ours and the unchanged one, of the same parameters."""
        torch.manual_seed(0)
        theirs = self.build().train(training).to(device)
        if self.channels_last:
            theirs = theirs.to(memory_format=torch.channels_last)
        return {OURS: convert(copy.deepcopy(theirs)), EAGER: theirs}


RESNET = partial(torchvision_model, "resnet50")
NETWORKS = (
    Network("ResNet-50", RESNET),
    Network("ResNet-50 channels_last", RESNET, channels_last=True),
    Network("ConvNeXt-T", partial(torchvision_model, "convnext_tiny")),
    Network("Swin-T", partial(torchvision_model, "swin_t")),
    Network("ViT-B/16", partial(torchvision_model, "vit_b_16")),
    Network("deformable ResNet-50", deformable_resnet),
    Network("g2p Transformer", Pronouncer, (12, 128), profiled=False),
)
QUICK = (
    Network("ResNet-18", partial(torchvision_model, "resnet18"), (3, 32, 32)),
    Network("g2p", Pronouncer, (5, 128), profiled=False),
)
COMPILED_NETWORKS = ("ResNet-50 channels_last", "ResNet-18")


@dataclass(frozen=True)
class Mode:
    """Evaluation, or a training step."""

    name: str
    training: bool
    batch: int

    def functions(self, network: Network, device: torch.device) -> dict[str, Function]:
        models = network.models(self.training, device)
        x = network.input(self.batch, device)
        if not self.training:
            return {name: partial(model, x) for name, model in models.items()}
        target = torch.randint(CLASSES, (self.batch,), device=device)
        return {name: partial(_step, model, x, target) for name, model in models.items()}

    @property
    def context(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext if self.training else torch.inference_mode


def _step(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    return loss.detach()


MODES = (Mode("evaluation", False, 8), Mode("training", True, 4))
QUICK_MODES = (Mode("evaluation", False, 1), Mode("training", True, 2))


def bars() -> Iterator[Bar]:
    for mode in MODES:
        for network in NETWORKS[:2]:
            yield Bar(f"{network.name}, {mode.name}", EAGER, 1 / 1.1)
        for network in NETWORKS[2:5]:
            yield Bar(f"{network.name}, {mode.name}", EAGER, 1 / 1.05)
        for network in NETWORKS:
            for family, limit in (("batch_norm", 1 / 1.3), ("layer_norm", 1 / 1.1), ("linear", 1.0)):
                group = f"{network.name}, {mode.name}: {family}"
                yield Bar(group, EAGER, 1.0, max)
                yield Bar(f"{group} in all", EAGER, limit)
    yield Bar("ResNet-50 channels_last, compiled evaluation", EAGER, 1.0)


BARS = tuple(bars())


def cases(settings: Settings) -> Iterator[Case]:
    networks, modes = (QUICK, QUICK_MODES) if settings.quick else (NETWORKS, MODES)
    for network in networks:
        for mode in modes:
            prepare = partial(mode.functions, network, settings.device)
            yield TimeCase(f"{network.name}, {mode.name}", f"batch {mode.batch}", prepare, mode=mode.context)
            if network.profiled:
                yield ProfileCase(network, mode)
    for network in networks:
        if network.name in COMPILED_NETWORKS:
            mode = modes[0]
            yield TimeCase(
                f"{network.name}, compiled {mode.name}",
                f"batch {mode.batch}",
                partial(compiled, network, mode, settings.device),
                mode=mode.context,
            )


# ---- the time of single operators ------------------------------------------------------------------------------------

BACKWARD = "autograd::engine::evaluate_function: "
Shape = tuple[int, ...]
Place = tuple[str, Shape]  # forward or backward, and what tells calls of a module from those of others


@dataclass(frozen=True)
class Family:
    """Modules of one kind: names of events, ours and torch's."""

    calls: tuple[str, ...]
    around: tuple[str, ...]  # what a module takes in, if it can
    backward: tuple[str, ...]  # of both

    def call(self, event: Any) -> Shape:
        """Of the input, sorted: one package has the channels where the other permutes to them."""
        return tuple(sorted(_shapes(event)[0]))

    def output(self, call: Shape) -> Shape:
        """What is left of a call's shape in that of its output."""
        return call

    def reader(self, event: Any) -> Shape:
        """That of the output, of an event that gets it, or its gradient."""
        return tuple(sorted(_shapes(event)[0]))


class LinearFamily(Family):
    """Linear layers: rows, features and outputs, however the rows are laid out; of their outputs, rows and outputs."""

    def call(self, event: Any) -> Shape:
        input, weight = _shapes(event)[:2]
        return math.prod(input[:-1]), input[-1], weight[0]

    def output(self, call: Shape) -> Shape:
        rows, _features, outputs = call
        return rows, outputs

    def reader(self, event: Any) -> Shape:
        output = _shapes(event)[0]
        return (math.prod(output[:-1]), output[-1]) if output else ()


FAMILIES = {
    "batch_norm": Family(
        calls=("aten::batch_norm", "myvision::batch_norm", "myvision::_batch_norm_in_place"),
        around=("aten::add", "aten::add_", "aten::relu", "aten::relu_"),
        backward=("NativeBatchNormBackward0", "BatchNormBackward", "BatchNorm.UpdateBackward", "ReluBackward0"),
    ),
    "layer_norm": Family(
        calls=("aten::layer_norm", "myvision::layer_norm"),
        around=(),
        backward=("NativeLayerNormBackward0", "LayerNormBackward"),
    ),
    "linear": LinearFamily(
        calls=("aten::linear", "myvision::linear"),
        around=("aten::gelu", "aten::relu", "aten::relu_"),
        backward=("AddmmBackward0", "MmBackward0", "LinearBackward", "GeluBackward0"),
    ),
}


@dataclass(frozen=True)
class ProfileCase:
    """The normalisations and the linear layers of a network, shape by shape, and all of a kind together."""

    network: Network
    mode: Mode

    @property
    def group(self) -> str:
        return f"{self.network.name}, {self.mode.name}"

    @property
    def name(self) -> str:
        return "operators"

    def measure(self, settings: Settings, limits: Limits) -> list[Result]:
        functions = self.mode.functions(self.network, settings.device)
        steps: dict[str, list[list[Any]]] = {name: [] for name in functions}
        with self.mode.context():
            for function in functions.values():
                function()
            for _ in range(1 if settings.quick else PROFILED_STEPS):
                for name, function in functions.items():
                    steps[name].append(_events(function))
        return [row for family in FAMILIES for row in self._rows(family, steps)]

    def _rows(self, family: str, steps: Mapping[str, list[list[Any]]]) -> list[Result]:
        calls = _calls(steps[EAGER][0], FAMILIES[family])
        milliseconds = {
            name: [_milliseconds(events, FAMILIES[family], calls) for events in found] for name, found in steps.items()
        }
        group, rows = f"{self.group}: {family}", []
        for place in sorted(milliseconds[EAGER][0], key=lambda place: (place[0] != "forward", place[1])):
            figures = {
                name: statistics.median(step[place] for step in found) / calls[place]
                for name, found in milliseconds.items()
            }
            direction, shape = place
            name = f"{direction} {'x'.join(map(str, shape))}, {calls[place]} calls"
            rows.append(Result(group, name, "ms", figures))
        if rows:
            of_step = {name: statistics.median(sum(s.values()) for s in found) for name, found in milliseconds.items()}
            rows.append(Result(f"{group} in all", f"batch {self.mode.batch}", "ms", of_step))
        return rows


def _events(function: Function) -> list[Any]:
    """The outermost events of a step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    return [event for event in profiler.events() if event.cpu_parent is None]


def _calls(events: Iterable[Any], family: Family) -> Counter[Place]:
    """How often the modules are called at each place; backward knows of outputs alone."""
    calls: Counter[Place] = Counter()
    for event in events:
        if event.name in family.calls:
            shape = family.call(event)
            calls["forward", shape] += 1
            calls["backward", family.output(shape)] += 1
    return calls


def _milliseconds(events: Iterable[Any], family: Family, calls: Mapping[Place, int]) -> dict[Place, float]:
    """Of a step, at each place where the unchanged network has calls.

    What is around a call counts for the last one whose output has its shape.
    """
    found: dict[Place, float] = defaultdict(float)
    last: dict[Shape, Shape] = {}
    for event in events:
        if event.name in family.calls:
            place = "forward", family.call(event)
            last[family.output(place[1])] = place[1]
        elif event.name in family.around:
            place = "forward", last.get(family.reader(event), ())
        elif event.name.removeprefix(BACKWARD) in family.backward:
            place = "backward", family.reader(event.cpu_children[0])
        else:
            continue
        if place in calls:
            found[place] += event.cpu_time_total / 1e3
    return found


def _shapes(event: Any) -> list[Shape]:
    """Of the tensors that the event got."""
    return event.input_shapes or [()]


def compiled(network: Network, mode: Mode, device: torch.device) -> Mapping[str, Function]:
    torch.compiler.reset()
    x = network.input(mode.batch, device)
    models = network.models(mode.training, device)
    return {name: partial(torch.compile(model, dynamic=False), x) for name, model in models.items()}
