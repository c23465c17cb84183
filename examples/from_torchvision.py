"""Puts myvision's deformable convolution where a model has torchvision's: same parameters, same results, faster.

python examples/from_torchvision.py
"""

import time
from collections.abc import Callable

import torch
import torchvision
from torch import nn

from myvision.nn import DeformConv2d


def replace_deform_convs(model: nn.Module) -> nn.Module:
    """Replaces every torchvision.ops.DeformConv2d inside a model, which keeps its parameters and their names."""
    for name, module in list(model.named_modules()):
        if type(module) is torchvision.ops.DeformConv2d:
            ours = DeformConv2d(
                module.in_channels,
                module.out_channels,
                module.kernel_size,
                module.stride,
                module.padding,
                module.dilation,
                module.groups,
                bias=module.bias is not None,
            )
            ours.load_state_dict(module.state_dict())
            model.set_submodule(name, ours)
    return model


class Detector(nn.Module):
    """Some model with a deformable convolution in it."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Conv2d(64, 18, kernel_size=3, padding=1)
        self.conv = torchvision.ops.DeformConv2d(64, 64, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x, self.offset(x))


def milliseconds(run: Callable[[], object], calls: int = 5) -> float:
    run()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e3


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    images = torch.rand(1, 64, 56, 56)
    model = Detector()
    expected, before = model(images), milliseconds(lambda: model(images))
    replace_deform_convs(model)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    print(f"the same results, in {milliseconds(lambda: model(images)):.1f} ms instead of {before:.1f} ms")


if __name__ == "__main__":
    main()
