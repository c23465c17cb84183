"""Run an installed myvision once: what a wheel must do wherever it loads.

python smoke_test.py [--torch VERSION]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn import functional as F

import myvision


def check_my_add() -> None:
    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(5)
    torch.testing.assert_close(myvision.ops.my_add(x, y), 2 * x + y)
    myvision.ops.my_add(x, y).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 5), 2.0))


def check_deform_conv2d() -> None:
    """Without offsets it is a convolution, gradients included."""
    x, weight = torch.randn(2, 4, 7, 9, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    offset = torch.zeros(2, 18, 7, 9)
    ours = myvision.ops.deform_conv2d(x, offset, weight, padding=1)
    theirs = F.conv2d(x, weight, padding=1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(output.sum(), (x, weight)) for output in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def check_norms() -> None:
    """They are torch's own, gradients and running statistics included."""
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    outputs, gradients, statistics = [], [], []
    for batch_norm in (myvision.nn.BatchNorm2d(6), torch.nn.BatchNorm2d(6)):
        outputs.append(F.layer_norm(batch_norm(x), (5,)))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), (x, *batch_norm.parameters())))
        statistics.append(batch_norm.state_dict())
    normalised = myvision.ops.layer_norm(myvision.nn.BatchNorm2d(6)(x), 5, activation="relu")
    torch.testing.assert_close(normalised, F.relu(outputs[1]))
    for ours, theirs in (outputs, gradients, statistics):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def check_attention() -> None:
    """It is torch's own, gradients included, and torch's encoder layer loads into ours."""
    query, key, value = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    ours = myvision.ops.scaled_dot_product_attention(query, key, value, is_causal=True)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(output.sum(), (query, key, value)) for output in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
    sizes: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    layers = myvision.nn.TransformerEncoderLayer(**sizes), torch.nn.TransformerEncoderLayer(**sizes)
    layers[0].load_state_dict(layers[1].state_dict())
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(layers[0](x), layers[1](x), rtol=1e-4, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="VERSION", help="insist on this torch, and on a CPU-only one")
    wanted = parser.parse_args().torch
    if wanted and (torch.__version__.partition("+")[0] != wanted or torch.version.cuda or torch.version.hip):
        raise SystemExit(f"this needs the CPU-only torch {wanted}, not {torch.__version__}: point pip at its index")
    check_my_add()
    check_deform_conv2d()
    check_norms()
    check_attention()
    print(f"myvision {myvision.__version__} works with torch {torch.__version__}")


if __name__ == "__main__":
    main()
