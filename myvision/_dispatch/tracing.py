"""Sizes under torch.jit.trace, which records them as tensors."""

from __future__ import annotations

import warnings

import torch
from torch.jit import TracerWarning  # type: ignore[attr-defined]


def is_tracing() -> bool:
    return torch._C._get_tracing_state() is not None


def constant(size: int) -> int:
    """A size as a number even under torch.jit.trace: for what is constant in a model, such as its geometry."""
    if not is_tracing():
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return int(size)
