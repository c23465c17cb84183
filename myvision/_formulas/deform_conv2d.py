"""Deformable convolution in plain torch: samples are gathered, and one matrix product does the rest.

Every function here is differentiable any number of times. Half types are computed in float32. Memory grows with the
number of samples: kernel size × output size × channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def deform_conv2d(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
) -> Tensor:
    """What ``torch.ops.myvision.deform_conv2d`` computes."""
    points = SamplingPoints.of(input, weight, offset, stride, padding, dilation, offset_groups)
    samples = points.sample(input) * _factors(mask, points)
    output = _grouped(weight, groups) @ _columns(samples, weight, groups)
    output = output.reshape(input.shape[0], weight.shape[0], *offset.shape[2:])
    if bias is not None:
        output = output + bias[:, None, None]
    return output.to(input.dtype)


def deform_conv2d_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """What ``torch.ops.myvision._deform_conv2d_backward`` computes: gradients of input, weight, offset, mask, bias."""
    points = SamplingPoints.of(input, weight, offset, stride, padding, dilation, offset_groups)
    samples, factors = points.sample(input), _factors(mask, points)
    grad = grad_output.to(points.down.dtype).unflatten(1, (groups, -1)).flatten(3)
    grad_samples = (_grouped(weight, groups).mT @ grad).reshape(samples.shape)
    grad_weight = (grad @ _columns(samples * factors, weight, groups).mT).sum(0).reshape(weight.shape)
    grad_moved = [
        (grad_samples * factors * slope).sum(2).unflatten(2, (-1, points.pixels)) for slope in points.slopes(input)
    ]
    grad_offset = torch.stack(grad_moved, 3).reshape(offset.shape)
    grad_mask = None if mask is None else (grad_samples * samples).sum(2).reshape(mask.shape).to(mask.dtype)
    return (
        points.scatter(grad_samples * factors, input).to(input.dtype),
        grad_weight.to(weight.dtype),
        grad_offset.to(offset.dtype),
        grad_mask,
        grad_output.sum((0, 2, 3)),
    )


def _factors(mask: Tensor | None, points: SamplingPoints) -> Tensor:
    """The mask as [batch, offset_groups, 1, samples]."""
    if mask is None:
        return torch.ones_like(points.down)
    return mask.to(points.down.dtype).reshape(points.down.shape)


def _grouped(weight: Tensor, groups: int) -> Tensor:
    """The weight as matrices [groups, out_channels / groups, in_channels / groups * taps]."""
    K, C, kernel_h, kernel_w = weight.shape
    real = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(real).reshape(groups, K // groups, C * kernel_h * kernel_w)


def _columns(samples: Tensor, weight: Tensor, groups: int) -> Tensor:
    """The samples as matrices [batch, groups, in_channels / groups * taps, output pixels]."""
    _, C, kernel_h, kernel_w = weight.shape
    taps = kernel_h * kernel_w
    return samples.reshape(samples.shape[0], groups, C * taps, samples.shape[3] // taps)


@dataclass(frozen=True)
class SamplingPoints:
    """Where every tap of every output pixel reads its input; all of shape [batch, offset_groups, 1, taps × pixels].

    Attributes:
        corner: index of the pixel up left of the point, in the image with a border of one zero around it.
        down, right: how far the point lies from there, 0 ... 1.
        inside: less than a whole pixel outside the image; false for NaN and infinity.
        pixels: number of output pixels.
    """

    corner: Tensor
    down: Tensor
    right: Tensor
    inside: Tensor
    pixels: int

    @staticmethod
    def of(
        input: Tensor,
        weight: Tensor,
        offset: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        offset_groups: int,
    ) -> SamplingPoints:
        H, W = input.shape[2:]
        kernel_size, output_size = weight.shape[2:], offset.shape[2:]
        taps, pixels = kernel_size.numel(), output_size.numel()
        real = torch.promote_types(offset.dtype, torch.float32)
        moved = offset.to(real).reshape(offset.shape[0], offset_groups, taps, 2, pixels)

        def positions(axis: int) -> Tensor:
            tap, pixel = (
                torch.arange(size[axis], dtype=real, device=offset.device).reshape(
                    [-1 if i == axis else 1 for i in (0, 1)]
                )
                for size in (kernel_size, output_size)
            )
            taps_at = (tap * dilation[axis]).expand(*kernel_size).reshape(taps, 1)
            pixels_at = (pixel * stride[axis] - padding[axis]).expand(*output_size).reshape(pixels)
            return (taps_at + pixels_at + moved[:, :, :, axis]).reshape(
                offset.shape[0], offset_groups, 1, taps * pixels
            )

        y, x = positions(0), positions(1)
        inside = (y >= -1) & (y < H) & (x >= -1) & (x < W)
        y, x = torch.where(inside, y, -1), torch.where(inside, x, -1)
        top, left = y.detach().floor(), x.detach().floor()
        corner = ((top + 1) * (W + 2) + left + 1).long()
        return SamplingPoints(corner, y - top, x - left, inside, pixels)

    def sample(self, input: Tensor) -> Tensor:
        """Bilinear samples, [batch, offset_groups, in_channels / offset_groups, taps × pixels]."""
        return self._combine(input, self._shares())

    def slopes(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the samples: downwards and to the right."""
        down, right = self.down, self.right
        along_y = (right - 1, -right, 1 - right, right)
        along_x = (down - 1, 1 - down, -down, down)
        return self._combine(input, along_y), self._combine(input, along_x)

    def scatter(self, grad_samples: Tensor, input: Tensor) -> Tensor:
        """The transpose of :meth:`sample`: the gradient of its input."""
        N, C, H, W = input.shape
        image = grad_samples.new_zeros(*grad_samples.shape[:3], (H + 2) * (W + 2))
        grad_samples = torch.where(self.inside, grad_samples, 0)
        for share, index in zip(self._shares(), self._corners(W), strict=True):
            image = image.scatter_add(3, index.expand(grad_samples.shape), share * grad_samples)
        return image.reshape(N, C, H + 2, W + 2)[:, :, 1:-1, 1:-1]

    def _shares(self) -> tuple[Tensor, ...]:
        down, right = self.down, self.right
        return (1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right

    def _corners(self, width: int) -> tuple[Tensor, ...]:
        return self.corner, self.corner + 1, self.corner + width + 2, self.corner + width + 3

    def _combine(self, input: Tensor, shares: Sequence[Tensor]) -> Tensor:
        N, C, H, W = input.shape
        groups = self.down.shape[1]
        image = F.pad(input.to(self.down.dtype), (1, 1, 1, 1)).reshape(N, groups, C // groups, (H + 2) * (W + 2))
        pixels = (image.gather(3, index.expand(-1, -1, C // groups, -1)) for index in self._corners(W))
        combined = sum(share * pixel for share, pixel in zip(shares, pixels, strict=True))
        return torch.where(self.inside, combined, 0)
