"""Instance normalisation as modules."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from myvision.nn._fused import FusedActivation
from myvision.ops.instance_norm import instance_norm


class _InstanceNorm(FusedActivation, nn.modules.instancenorm._InstanceNorm):
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if isinstance(input, torch.fx.Proxy):  # which has no dimensions yet: there is a batch
            return self._normalise(input, residual)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        self._check_num_features(input)
        if input.dim() == self._no_batch_dim:
            batch_residual = None if residual is None else residual.unsqueeze(0)
            return self._normalise(input.unsqueeze(0), batch_residual).squeeze(0)
        return self._normalise(input, residual)

    @property
    def _no_batch_dim(self) -> int:
        return self._get_no_batch_dim()  # type: ignore[no-untyped-call]

    def _check_num_features(self, input: Tensor) -> None:
        dim = input.dim() - self._no_batch_dim
        if input.size(dim) == self.num_features:
            return
        message = f"input has {input.size(dim)} channels in dimension {dim}, but num_features is {self.num_features}"
        if self.affine:
            raise ValueError(message)
        warnings.warn(f"{message}, which does not matter as affine is False", stacklevel=3)

    def _normalise(self, input: Tensor, residual: Tensor | None) -> Tensor:
        return instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum or 0.0,
            self.eps,
            residual=residual,
            activation=self.activation,
            negative_slope=self.negative_slope,
        )


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """A ``torch.nn.InstanceNorm1d`` with an activation of its own: see :class:`InstanceNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, length]`` or ``[num_features, length]``.
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """Instance normalisation, see :func:`myvision.ops.instance_norm`: ``activation(norm(input) + residual)`` at once.

    A ``torch.nn.InstanceNorm2d`` in every other respect.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            ``torch.nn.InstanceNorm2d``; neither affine nor tracking by default.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_features, height, width]`` or ``[num_features, height, width]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation, an input of other dimensions or, where there are parameters, channels, or one
            value per channel in training.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import InstanceNorm2d
        >>> layer = InstanceNorm2d(8, affine=True, activation="relu")
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Instance Normalization: The Missing Ingredient for Fast Stylization <https://arxiv.org/abs/1607.08022>`_.
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """A ``torch.nn.InstanceNorm3d`` with an activation of its own: see :class:`InstanceNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, depth, height, width]`` or without ``batch``.
    """
