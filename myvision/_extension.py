"""Loads the operator libraries, and says what is wrong where that fails."""

from __future__ import annotations

from pathlib import Path

import torch

_DIRECTORY = Path(__file__).parent


def load() -> None:
    torch.ops.load_library(str(_DIRECTORY / "_C.so"))
    if (torch.version.cuda or torch.version.hip) and (_DIRECTORY / "_C_cuda.so").is_file():
        torch.ops.load_library(str(_DIRECTORY / "_C_cuda.so"))


def has_cuda_ops() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("myvision::my_add", "CUDA")
