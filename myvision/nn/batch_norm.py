"""Batch normalisation as modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _NormBase

from myvision._dispatch.overrides import may_be_overwritten
from myvision._layout import is_dense
from myvision.nn._activation import constants
from myvision.nn._norm import Norm, NormAct
from myvision.ops.batch_norm import batch_norm


class BatchNormForward(Norm):
    """The call of every batch norm. Statistics and the number of batches move only where the operator succeeded."""

    __constants__: ClassVar = constants(_NormBase)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(input, residual, self.activation, self.negative_slope)

    def fused(self, input: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float) -> Tensor:
        """``activation(norm(input) + residual)``, whatever the module's own activation."""
        self._check_input_dim(input)
        mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        momentum = self.momentum
        if not self.training:
            return self._normalise(input, residual, mean, var, 0.0, activation, negative_slope)
        if not self.track_running_stats:
            return self._normalise(input, residual, None, None, 0.0, activation, negative_slope)
        if momentum is not None:
            output = self._normalise(input, residual, mean, var, momentum, activation, negative_slope)
            if batches is not None:
                batches.add_(1)
            return output
        if batches is None or mean is None or var is None:
            return self._normalise(input, residual, mean, var, 0.0, activation, negative_slope)
        new_mean, new_var = mean.clone(), var.clone()
        output = self._normalise(input, residual, new_mean, new_var, 1.0, activation, negative_slope)
        batches.add_(1)
        # The share of this batch stays a tensor: a number would have a GPU wait, and break a compiled graph.
        share = 1 / batches.to(mean.dtype)
        mean.lerp_(new_mean, share)
        var.lerp_(new_var, share)
        return output

    def _normalise(
        self,
        input: Tensor,
        residual: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        momentum: float,
        activation: str | None,
        negative_slope: float,
    ) -> Tensor:
        training = self.training or (mean is None and var is None)
        if not is_scripting():
            return batch_norm(
                input,
                mean,
                var,
                self.weight,
                self.bias,
                training,
                momentum,
                self.eps,
                residual=residual,
                activation=activation,
                negative_slope=negative_slope,
            )
        elif training and mean is not None and var is not None:  # noqa: RET505  TorchScript compiles what follows
            return torch.ops.myvision.batch_norm(
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
            return torch.ops.myvision.batch_norm(
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

    @torch.jit.unused
    def can_overwrite(self, input: Tensor) -> bool:
        """Whether `overwrite` may take a tensor that no one else reads: in evaluation, without gradients."""
        statistics = self.running_mean is not None and self.running_var is not None
        return not self.training and statistics and may_be_overwritten(input) and is_dense(input)

    @torch.jit.unused
    def overwrite(
        self, input: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float
    ) -> Tensor:
        """As `fused`, into the memory of the input, which spares a network half of its traffic there."""
        self._check_input_dim(input)
        affine = self.weight, self.bias, residual
        statistics = self.running_mean, self.running_var
        torch.ops.myvision._batch_norm_in_place(input, *statistics, *affine, self.eps, activation, negative_slope)
        return input


class BatchNormAct(NormAct, BatchNormForward, _NormBase):
    """What batch norms with an activation share: the constructor."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
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


class BatchNorm1d(BatchNormForward, nn.BatchNorm1d):
    """A ``torch.nn.BatchNorm1d``: see :class:`BatchNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features]`` or ``[batch, num_features, length]``.
    """


class BatchNorm2d(BatchNormForward, nn.BatchNorm2d):
    """Batch normalisation, see :func:`myvision.ops.batch_norm`: ``norm(input) + residual`` in one pass.

    A ``torch.nn.BatchNorm2d`` in every other respect: parameters, buffers, ``state_dict`` and what training and
    evaluation do with them. With an activation it is :class:`BatchNormAct2d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``torch.nn.BatchNorm2d``.

    Shape:
        - input: ``[batch, num_features, height, width]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: in the call, for an input without 4 dimensions, or one value per channel in training.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together. Running statistics and the
            number of batches then stay as they are.

    Example::

        >>> import torch
        >>> from myvision.nn import BatchNorm2d
        >>> layer = BatchNorm2d(8)
        >>> x = torch.rand(2, 8, 16, 16)
        >>> layer(x, residual=x).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift
    <https://arxiv.org/abs/1502.03167>`_.
    """


class BatchNorm3d(BatchNormForward, nn.BatchNorm3d):
    """A ``torch.nn.BatchNorm3d``: see :class:`BatchNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, depth, height, width]``.
    """


class BatchNormAct1d(BatchNormAct):
    """A :class:`BatchNorm1d` with an activation: see :class:`BatchNormAct2d`.

    Shape:
        - input, residual, output: ``[batch, num_features]`` or ``[batch, num_features, length]``.
    """

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class BatchNormAct2d(BatchNormAct):
    """Batch normalisation with an activation: ``activation(norm(input) + residual)`` in one pass.

    Parameters, buffers and ``state_dict`` are those of ``torch.nn.BatchNorm2d``. It is no subclass of it, so utilities
    of torch that replace batch norms or fold them into convolutions leave it whole, and so does
    ``torch.optim.swa_utils.update_bn``; :meth:`SyncBatchNorm.convert_sync_batchnorm` converts it.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``torch.nn.BatchNorm2d``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_features, height, width]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation; in the call as :class:`BatchNorm2d`.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import BatchNormAct2d
        >>> layer = BatchNormAct2d(8, activation="silu")
        >>> x = torch.rand(2, 8, 16, 16)
        >>> layer(x, residual=x).shape
        torch.Size([2, 8, 16, 16])
    """

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class BatchNormAct3d(BatchNormAct):
    """A :class:`BatchNorm3d` with an activation: see :class:`BatchNormAct2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, depth, height, width]``.
    """

    _check_input_dim = nn.BatchNorm3d._check_input_dim
