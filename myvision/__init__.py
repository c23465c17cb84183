"""Fast operators for PyTorch, on the CPU and on CUDA and ROCm GPUs."""

from importlib.util import find_spec

from myvision import _extension
from myvision._extension import has_cuda_ops

__version__ = "0.1.0"

_extension.load()

__all__ = ["has_cuda_ops", "nn", "ops"]

if find_spec("myvision.ops"):
    from myvision import ops
if find_spec("myvision.nn"):
    from myvision import nn
