"""Batch normalisation as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from myvision.nn._fused import FusedActivation
from myvision.ops.batch_norm import batch_norm


class _BatchNorm(FusedActivation, nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if not isinstance(input, torch.fx.Proxy):  # which has no dimensions yet
            self._check_input_dim(input)  # type: ignore[no-untyped-call]
        tracks = self.training and self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracks or not self.training else (None, None)
        batches = self.num_batches_tracked
        if tracks and batches is not None:
            batches.add_(1)
            if self.momentum is None and mean is not None and var is not None:
                return self._normalise_and_average(input, residual, mean, var, batches)
        return self._normalise(input, residual, mean, var, self.momentum or 0.0)

    def _normalise_and_average(
        self, input: Tensor, residual: Tensor | None, mean: Tensor, var: Tensor, batches: Tensor
    ) -> Tensor:
        """The running statistics become the mean of those of all batches.

        The share of this batch stays a tensor: a number would have a GPU wait, and break a compiled graph.
        """
        new_mean, new_var = mean.clone(), var.clone()
        output = self._normalise(input, residual, new_mean, new_var, momentum=1.0)
        for running, new in ((mean, new_mean), (var, new_var)):
            running.lerp_(new, 1 / batches.to(running.dtype))
        return output

    def _normalise(
        self, input: Tensor, residual: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float
    ) -> Tensor:
        return batch_norm(
            input,
            mean,
            var,
            self.weight,
            self.bias,
            self.training or (mean is None and var is None),
            momentum,
            self.eps,
            residual=residual,
            activation=self.activation,
            negative_slope=self.negative_slope,
        )


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """A ``torch.nn.BatchNorm1d`` with an activation of its own: see :class:`BatchNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features]`` or ``[batch, num_features, length]``.
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Batch normalisation, see :func:`myvision.ops.batch_norm`: ``activation(norm(input) + residual)`` in one pass.

    A ``torch.nn.BatchNorm2d`` in every other respect: parameters, buffers, ``state_dict`` and what training and
    evaluation do with them. Utilities of torch that would drop the activation, such as
    ``torch.nn.utils.fusion.fuse_conv_bn_eval``, raise; ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` does too, and
    :meth:`SyncBatchNorm.convert_sync_batchnorm` keeps it.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``torch.nn.BatchNorm2d``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_features, height, width]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation, an input without 4 dimensions, or one value per channel in training.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import BatchNorm2d
        >>> layer = BatchNorm2d(8, activation="relu")
        >>> x = torch.rand(2, 8, 16, 16)
        >>> layer(x, residual=x).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift
    <https://arxiv.org/abs/1502.03167>`_.
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """A ``torch.nn.BatchNorm3d`` with an activation of its own: see :class:`BatchNorm2d`.

    Shape:
        - input, residual, output: ``[batch, num_features, depth, height, width]``.
    """
