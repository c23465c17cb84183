"""What the steps of dropout, addition and norm share."""

from __future__ import annotations

from myvision.nn._dropout import checked_probability
from myvision.nn._leaf import Leaf


class AddNorm(Leaf):
    """A base to stand before torch's norm: the dropout in front of it."""

    dropout_p: float = 0.0

    def _set_dropout(self, dropout_p: float) -> None:
        self.dropout_p = checked_probability(dropout_p)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"  # type: ignore[misc]
