"""Has a model that is made of torch's and torchvision's modules run myvision's operators."""

from __future__ import annotations

from torch import nn

from myvision._convert.fuse import fuse
from myvision._convert.replace import replace

__all__ = ["convert"]


def convert(model: nn.Module) -> nn.Module:
    """Changes a model in place, and returns it: its modules become ours, and some take in what follows them.

    Parameters, buffers, names and hooks stay what they are, as does what the model computes.
    """
    replace(model)
    fuse(model)
    return model
