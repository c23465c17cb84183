"""Dropout as a part of a norm."""

from __future__ import annotations

from typing import Any


class DropsInput:
    """A base to stand before torch's module: adds ``dropout_p`` to its constructor."""

    dropout_p: float

    def __init__(self, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= dropout_p <= 1:
            raise ValueError(f"dropout_p must be between 0 and 1, but is {dropout_p}")
        self.dropout_p = dropout_p

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"  # type: ignore[misc]
