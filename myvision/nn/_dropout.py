"""What modules with dropout share."""

from __future__ import annotations


def checked_probability(dropout_p: float) -> float:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, but is {dropout_p}")
    return dropout_p
