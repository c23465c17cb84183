"""torch.fx records our modules as it does those of torch.nn: one call, whatever their mode and the shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_tensor
from torch import Tensor, fx, nn

import myvision.nn as ours

MODULES = {
    "BatchNorm2d": (lambda: ours.BatchNorm2d(6), (2, 6, 4, 5)),
    "BatchNormAct2d": (lambda: ours.BatchNormAct2d(6), (2, 6, 4, 5)),
    "InstanceNorm2d, one image": (lambda: ours.InstanceNorm2d(6), (6, 4, 5)),
    "GroupNormAct": (lambda: ours.GroupNormAct(2, 6), (2, 6, 4, 5)),
    "LayerNorm": (lambda: ours.LayerNorm(6), (2, 5, 6)),
    "LayerNorm2d": (lambda: ours.LayerNorm2d(6), (2, 6, 4, 5)),
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
