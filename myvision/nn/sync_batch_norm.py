"""Batch normalisation over the batches of several processes as a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from myvision._dispatch.distributed import accept_on_cpu
from myvision.nn.batch_norm import BatchNormAct, BatchNormForward
from myvision.ops._norm import real_dtype

Group = Any  # a process group; torch.distributed has the type only where it was built


class _Synchronises(BatchNormForward):
    """The call of a batch norm whose statistics are those of the batches of all processes."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

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
        group = self._group_to_synchronise()
        if group is None:
            return super()._normalise(input, residual, mean, var, momentum, activation, negative_slope)
        if residual is not None and torch.is_autocast_enabled(input.device.type):
            residual = residual.to(input.dtype)
        moments = _Moments.of(input.detach(), group)
        output = _Normalise.apply(
            input,
            self.weight,
            self.bias,
            residual,
            moments.statistics(self.eps, real_dtype(input)),
            moments.count,
            group,
            activation,
            negative_slope,
        )
        if mean is not None and var is not None:
            moments.update_(mean, var, momentum)
        return output

    def _group_to_synchronise(self) -> Group | None:
        """The processes to synchronise with; None in evaluation, and where there is no other process."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None


class SyncBatchNormAct(_Synchronises, BatchNormAct):
    """A :class:`SyncBatchNorm` with an activation: ``activation(norm(input) + residual)``.

    Parameters, buffers and ``state_dict`` are those of ``torch.nn.SyncBatchNorm``, of which it is no subclass.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype, bias: as in
            ``torch.nn.SyncBatchNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_features, ...]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation; in the call as :class:`SyncBatchNorm`.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import SyncBatchNormAct
        >>> SyncBatchNormAct(8, activation="silu")(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = "relu",
        negative_slope: float = 0.01,
    ) -> None:
        options: dict[str, Any] = {"bias": bias, "activation": activation, "negative_slope": negative_slope}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group


class SyncBatchNorm(_Synchronises, nn.SyncBatchNorm):
    """Batch normalisation with the statistics of the batches of all processes: ``norm(input) + residual``.

    A ``torch.nn.SyncBatchNorm`` that also works on the CPU, over gloo; ``DistributedDataParallel``, which refuses
    torch's there, takes it. Batches may be of different sizes, and empty. Processes exchange means, variances and
    counts in float64, and merge them in the order of their ranks. With an activation it is :class:`SyncBatchNormAct`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype, bias: as in
            ``torch.nn.SyncBatchNorm``.

    Shape:
        - input: ``[batch, num_features, ...]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: in the call, an input of less than 2 dimensions or without channels, or one value per channel in
            training without other processes.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import BatchNormAct2d, SyncBatchNorm
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), BatchNormAct2d(8, activation="relu"))
        >>> SyncBatchNorm.convert_sync_batchnorm(model)[1].activation
        'relu'
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Group | None = None) -> nn.Module:
        """Replaces the batch norms of a model, torch's and ours: those with an activation by :class:`SyncBatchNormAct`.

        Args:
            module: a model, or a batch norm.
            process_group: the processes to synchronise. Default: all.

        Returns:
            The model, changed in place, or for a batch norm a new module with its parameters and buffers.
        """
        if isinstance(module, BatchNormAct):
            options = {"activation": module.activation, "negative_slope": module.negative_slope}
            return _converted(SyncBatchNormAct, module, process_group, **options)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return _converted(cls, module, process_group)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module


accept_on_cpu(SyncBatchNorm)


def _converted(cls: type[nn.Module], module: Any, process_group: Group | None, **options: Any) -> nn.Module:
    """A batch norm of this class with the parameters, buffers and mode of another."""
    shape = module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    converted = cls(*shape, process_group, **options)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
        setattr(converted, name, getattr(module, name))
    if hasattr(module, "qconfig"):
        converted.qconfig = module.qconfig
    return converted


class _Moments:
    """Mean and variance of each channel over the batches of all processes, and how many numbers those are of."""

    def __init__(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self.mean, self.variance, self.count = mean, variance, count

    @staticmethod
    def of(input: Tensor, group: Group) -> _Moments:
        C = input.shape[1]
        own_mean, own_variance = _own_moments(input)
        own_count = own_mean.new_full((1,), input.numel() // C)
        means, variances, counts = _gather(torch.cat([own_mean, own_variance, own_count]), group).split([C, C, 1], 1)
        count = counts.sum()
        shares = counts / count.clamp(min=1)
        mean = (shares * means).sum(0)
        return _Moments(mean, (shares * (variances + (means - mean).square())).sum(0), count)

    def update_(self, running_mean: Tensor, running_var: Tensor, momentum: float) -> None:
        """Moves the running statistics, the variance by the unbiased one; nothing where all batches are empty."""
        share = momentum * self.count.clamp(max=1)
        unbiased = self.variance * self.count / (self.count - 1).clamp(min=1)
        for running, new in ((running_mean, self.mean), (running_var, unbiased)):
            running.copy_((1 - share) * running + share * new)

    def statistics(self, eps: float, dtype: torch.dtype) -> Tensor:
        """As kernels take them: mean, what it loses by being rounded, and 1 / sqrt(variance + eps)."""
        mean = self.mean.to(dtype)
        return torch.stack([mean, (self.mean - mean).to(dtype), torch.rsqrt(self.variance + eps).to(dtype)])


def _own_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of this process's batch, in float64; zeros where the batch is empty."""
    if input.numel() == 0:
        zeros = input.new_zeros(input.shape[1], dtype=torch.float64)
        return zeros, zeros
    mean, rest, inverse_deviation = torch.ops.myvision._batch_norm_statistics(input).double()
    return mean + rest, inverse_deviation.pow(-2)


def _gather(tensor: Tensor, group: Group) -> Tensor:
    """The tensors of all processes, in the order of their ranks, so that a sum over them is the same in each run."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor, group)
    return torch.stack(tensors)


class _Normalise(torch.autograd.Function):
    """activation(norm(input) + residual) with given statistics, through which the gradient of the input flows."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        statistics: Tensor,
        count: Tensor,
        group: Group,
        activation: str | None,
        negative_slope: float,
    ) -> Tensor:
        recomputed = (bias, residual) if activation else (None, None)  # what the activation was of
        ctx.save_for_backward(input, statistics, count, weight, *recomputed)
        ctx.group, ctx.activation, ctx.negative_slope = group, activation, negative_slope
        ctx.bias_type = None if bias is None else bias.dtype
        return torch.ops.myvision._batch_norm_given(
            input, statistics, weight, bias, residual, activation, negative_slope
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, statistics, count, weight, bias, residual = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        norm = (weight, bias, residual, ctx.activation, ctx.negative_slope)
        sums = torch.ops.myvision._batch_norm_sums(grad_output, input, statistics, *norm)
        means = (_gather(sums.double(), ctx.group).sum(0) / count).to(sums.dtype)
        grad_input, grad_residual = torch.ops.myvision._batch_norm_finish(
            grad_output, input, statistics, means, *norm, [needs_input, needs_residual]
        )
        grad_weight = sums[1].to(weight.dtype) if needs_weight else None
        grad_bias = sums[0].to(ctx.bias_type) if needs_bias else None
        return (
            grad_input if needs_input else None,
            grad_weight,
            grad_bias,
            grad_residual if needs_residual else None,
            *[None] * 5,
        )
