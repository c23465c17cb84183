"""A residual block with a deformable convolution that predicts its own offsets, trained for a few steps.

python examples/deformable_block.py
"""

import torch
from torch import nn

from myvision.nn import DeformConv2dPack
from myvision.ops import my_add


class DeformableBlock(nn.Module):
    """[N, C, H, W] to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = DeformConv2dPack(channels, channels, kernel_size=3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(my_add(x, self.norm(self.conv(x))))


def main() -> None:
    torch.manual_seed(0)
    block = DeformableBlock(32)
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-3)
    images = torch.rand(4, 32, 24, 24)
    targets = images.roll(1, dims=-1)  # each image, one pixel to the right: a matter of offsets

    for step in range(20):
        loss = nn.functional.mse_loss(block(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:2}: loss {loss.item():.4f}")
    print(f"largest offset predicted: {block.conv.conv_offset(images)[:, :18].abs().max().item():.2f} pixels")


if __name__ == "__main__":
    main()
