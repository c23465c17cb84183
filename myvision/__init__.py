"""Operators for PyTorch that are fast on the CPU, with kernels for CUDA and ROCm GPUs."""

from myvision import _extension
from myvision._extension import has_cuda_ops

_extension.load()  # before the modules that look the operators up

from myvision import nn, onnx, ops  # noqa: E402

__version__ = "0.1.0"
__all__ = ["has_cuda_ops", "nn", "onnx", "ops"]
