"""Instance normalisation as modules."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _NormBase

from myvision.nn._activation import constants
from myvision.nn._norm import Norm, NormAct
from myvision.ops.instance_norm import instance_norm


class InstanceNormForward(Norm):
    """The call of every instance norm, with a batch and without."""

    __constants__: ClassVar = constants(_NormBase)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(input, residual, self.activation, self.negative_slope)

    def fused(self, input: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float) -> Tensor:
        """``activation(norm(input) + residual)``, whatever the module's own activation."""
        self._check_input_dim(input)
        dim = input.dim() - self._get_no_batch_dim()
        channels = input.size(dim)
        if channels != self.num_features:
            message = f"input has {channels} channels in dimension {dim}, but num_features is {self.num_features}"
            if self.affine:
                raise ValueError(message)
            warnings.warn(message + ", which does not matter as affine is False", stacklevel=2)
        if dim == 1:
            return self._normalise(input, residual, activation, negative_slope)
        batch_residual = None if residual is None else residual.unsqueeze(0)
        return self._normalise(input.unsqueeze(0), batch_residual, activation, negative_slope).squeeze(0)

    def _normalise(
        self, input: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float
    ) -> Tensor:
        mean, var = self.running_mean, self.running_var
        uses_own = self.training or not self.track_running_stats
        momentum = self.momentum
        if momentum is None:
            momentum = 0.0
        if not is_scripting():
            return instance_norm(
                input,
                mean,
                var,
                self.weight,
                self.bias,
                uses_own,
                momentum,
                self.eps,
                residual=residual,
                activation=activation,
                negative_slope=negative_slope,
            )
        elif uses_own and mean is not None and var is not None:  # noqa: RET505  TorchScript compiles what follows
            return torch.ops.myvision.instance_norm(
                input,
                mean,
                var,
                self.weight,
                self.bias,
                residual,
                momentum,
                self.eps,
                activation,
                negative_slope,
            )
        else:
            return torch.ops.myvision.instance_norm(
                input,
                mean,
                var,
                self.weight,
                self.bias,
                residual,
                self.eps,
                activation,
                negative_slope,
            )


class InstanceNormAct(NormAct, InstanceNormForward, _NormBase):
    """What instance norms with an activation share: the constructor."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = "relu",
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._set_activation(activation, negative_slope)


class InstanceNorm1d(InstanceNormForward, nn.InstanceNorm1d):
    """A ``torch.nn.InstanceNorm1d``: see :class:`InstanceNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, length]`` or ``[num_features, length]``.
    """


class InstanceNorm2d(InstanceNormForward, nn.InstanceNorm2d):
    """Instance normalisation, see :func:`myvision.ops.instance_norm`: ``norm(input) + residual`` in one pass.

    A ``torch.nn.InstanceNorm2d`` in every other respect. With an activation it is :class:`InstanceNormAct2d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            ``torch.nn.InstanceNorm2d``; neither affine nor tracking by default.

    Shape:
        - input: ``[batch, num_features, height, width]`` or ``[num_features, height, width]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: in the call, for an input of other dimensions or, where there are parameters, channels, or one
            value per channel in training.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import InstanceNorm2d
        >>> layer = InstanceNorm2d(8, affine=True)
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Instance Normalization: The Missing Ingredient for Fast Stylization <https://arxiv.org/abs/1607.08022>`_.
    """


class InstanceNorm3d(InstanceNormForward, nn.InstanceNorm3d):
    """A ``torch.nn.InstanceNorm3d``: see :class:`InstanceNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, depth, height, width]`` or without ``batch``.
    """


class InstanceNormAct1d(InstanceNormAct):
    """An :class:`InstanceNorm1d` with an activation: see :class:`InstanceNormAct2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, length]`` or ``[num_features, length]``.
    """

    _check_input_dim = nn.InstanceNorm1d._check_input_dim
    _get_no_batch_dim = nn.InstanceNorm1d._get_no_batch_dim


class InstanceNormAct2d(InstanceNormAct):
    """Instance normalisation with an activation: ``activation(norm(input) + residual)`` in one pass.

    Parameters, buffers and ``state_dict`` are those of ``torch.nn.InstanceNorm2d``, of which it is no subclass.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            ``torch.nn.InstanceNorm2d``; neither affine nor tracking by default.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_features, height, width]`` or ``[num_features, height, width]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation; in the call as :class:`InstanceNorm2d`.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import InstanceNormAct2d
        >>> layer = InstanceNormAct2d(8, affine=True)
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    _check_input_dim = nn.InstanceNorm2d._check_input_dim
    _get_no_batch_dim = nn.InstanceNorm2d._get_no_batch_dim


class InstanceNormAct3d(InstanceNormAct):
    """An :class:`InstanceNorm3d` with an activation: see :class:`InstanceNormAct2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, depth, height, width]`` or without ``batch``.
    """

    _check_input_dim = nn.InstanceNorm3d._check_input_dim
    _get_no_batch_dim = nn.InstanceNorm3d._get_no_batch_dim
