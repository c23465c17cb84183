"""my_add as a module."""

from __future__ import annotations

from torch import Tensor, nn

from myvision.nn._leaf import Leaf
from myvision.ops.my_add import my_add


class MyAdd(Leaf, nn.Module):
    """Computes ``2 * x + y``: :func:`myvision.ops.my_add` as a module without parameters.

    Shape:
        - ``x``, ``y``: any shapes that broadcast together.
        - Output: the broadcast shape.

    Example:
        >>> MyAdd()(torch.ones(2, 3), torch.zeros(3))
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return my_add(x, y)
