"""torch.fx records our modules as it does those of torch.nn: one call, whatever their mode and the shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_tensor
from torch import Tensor, fx, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_fx

import myvision.nn as ours

MODULES = {
    "BatchNorm2d": (lambda: ours.BatchNorm2d(6), (2, 6, 4, 5)),
    "BatchNormAct2d": (lambda: ours.BatchNormAct2d(6), (2, 6, 4, 5)),
    "InstanceNorm2d, one image": (lambda: ours.InstanceNorm2d(6), (6, 4, 5)),
    "GroupNormAct": (lambda: ours.GroupNormAct(2, 6), (2, 6, 4, 5)),
    "DeformConv2dPack": (lambda: ours.DeformConv2dPack(6, 4, 3), (2, 6, 4, 5)),
    "LayerNorm": (lambda: ours.LayerNorm(6), (2, 5, 6)),
    "LayerNorm2d": (lambda: ours.LayerNorm2d(6), (2, 6, 4, 5)),
    "Linear": (lambda: ours.Linear(6, 4), (2, 5, 6)),
    "LinearAct": (lambda: ours.LinearAct(6, 4), (2, 5, 6)),
    "RMSNorm": (lambda: ours.RMSNorm(6), (2, 5, 6)),
    "TransformerEncoderLayer": (lambda: ours.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), (2, 5, 6)),
}


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_a_leaf(name: str) -> None:
    make, shape = MODULES[name]
    model, x = nn.Sequential(nn.Identity(), make()), random_tensor(*shape)
    graph = fx.symbolic_trace(model)
    assert targets(graph) == ["0", "1"]
    torch.testing.assert_close(graph(x), model(x))


def test_the_mode_of_the_graph_decides() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 6, 3), ours.BatchNorm2d(6)), random_tensor(2, 3, 7, 7)
    graph = fx.symbolic_trace(model)
    norm = model[1]
    assert norm.num_batches_tracked == 0  # tracing is no call
    graph.train()
    graph(x)
    assert norm.num_batches_tracked == 1
    graph.eval()
    hidden = model[0](x)
    expected = nn.functional.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    torch.testing.assert_close(graph(x), expected)


def test_a_residual_and_keywords_are_recorded() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ours.BatchNormAct2d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, residual=x)

    block, x = Block().eval(), random_tensor(2, 6, 4, 5)
    graph = fx.symbolic_trace(block)
    assert targets(graph) == ["norm"]
    torch.testing.assert_close(graph(x), (x / (1 + 1e-5) ** 0.5 + x).relu())


def test_attention_within_a_model() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = ours.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    block, x = Block(), random_tensor(2, 5, 6)
    graph = fx.symbolic_trace(block)
    assert targets(graph) == ["attention"]
    torch.testing.assert_close(graph(x), block(x))


def test_feature_extraction() -> None:
    models = pytest.importorskip("torchvision.models")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    network = models.resnet18(norm_layer=ours.BatchNorm2d).eval()
    extractor = extraction.create_feature_extractor(network, ["layer1"])
    x = random_tensor(1, 3, 32, 32)
    expected = network.layer1(network.maxpool(network.relu(network.bn1(network.conv1(x)))))
    torch.testing.assert_close(extractor(x)["layer1"], expected)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_root_is_looked_into(norm_first: bool) -> None:
    """Of a layer's own modules each is then a call, those of a fused step too, and dropout follows the mode."""
    layer = ours.TransformerEncoderLayer(6, 2, 8, norm_first=norm_first)
    given = {"src_mask": None, "src_key_padding_mask": None, "is_causal": False}
    graph = fx.symbolic_trace(layer, concrete_args=given)
    assert set(targets(graph)) == {name for name, _ in layer.named_children()}
    x = random_tensor(5, 2, 6)
    assert not torch.equal(graph(x), graph(x))
    torch.testing.assert_close(graph.eval()(x), layer.eval()(x))


def test_hooks_run_once() -> None:
    model, x = nn.Sequential(ours.LayerNorm(6), nn.Identity()), random_tensor(2, 5, 6)
    model[0].register_forward_hook(lambda module, args, output: 3 * output)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_quantisation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), ours.BatchNormAct2d(6), nn.Conv2d(6, 6, 3), nn.ReLU()).eval()
    x = random_tensor(2, 3, 9, 9)
    prepared = prepare_fx(model, get_default_qconfig_mapping("fbgemm"), (x,))
    assert type(prepared.get_submodule("1")) is ours.BatchNormAct2d
    torch.testing.assert_close(prepared(x), model(x))


def test_a_graph_made_by_hand() -> None:
    """Without a tracer there is no root to call the module of, and it is looked into."""
    graph, norm = fx.Graph(), ours.LayerNorm(6, elementwise_affine=False)
    x = fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph))
    graph.output(norm(x).node)
    given = random_tensor(2, 5, 6)
    torch.testing.assert_close(fx.GraphModule(nn.Module(), graph)(given), norm(given))
