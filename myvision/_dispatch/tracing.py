"""Sizes under torch.jit.trace, which records them as tensors."""

from __future__ import annotations

import warnings

import torch
from torch.jit import TracerWarning  # type: ignore[attr-defined]


def constant(size: int) -> int:
    """A size as a number even under torch.jit.trace: for what is constant in a model, such as its geometry."""
    if torch._C._get_tracing_state() is None:
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return int(size)
