"""Dropout by a generator that counts, Philox4x32-10, so that any element's fate can be computed again on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from myvision._formulas._normalise import real

_WORD = 0xFFFFFFFF
_ROUNDS = 10


def dropout(input: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """The input with each element dropped with probability p and the others scaled by 1 / (1 - p).

    Half types become float32.

    Args:
        input: a tensor of any shape.
        p: 0 ... 1.
        seed: one int64, or None where p is 0.
    """
    if seed is None or p == 0:
        return real(input)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return real(input) * keep_mask(input, p, seed) * scale


def keep_mask(input: Tensor, p: float, seed: Tensor) -> Tensor:
    """Whether each element is kept. Four neighbours, in the order of their indices, share a counter."""
    element = torch.arange(input.numel(), device=input.device).reshape(input.shape)
    words = torch.stack(philox(seed.reshape(()), element // 4), dim=-1)
    word = words.gather(-1, (element % 4).unsqueeze(-1)).squeeze(-1)
    return word >= int(p * 2**32)


def philox(key: Tensor, counter: Tensor) -> tuple[Tensor, ...]:
    """Four random words of 32 bits, as int64, for each counter."""
    key_words = [key & _WORD, key >> 32 & _WORD]
    c0, c1, c2, c3 = counter & _WORD, counter >> 32 & _WORD, torch.zeros_like(counter), torch.zeros_like(counter)
    for _ in range(_ROUNDS):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # wrap around, which leaves all 64 bits right
        c0, c1, c2, c3 = (
            (b >> 32 & _WORD) ^ c1 ^ key_words[0],
            b & _WORD,
            (a >> 32 & _WORD) ^ c3 ^ key_words[1],
            a & _WORD,
        )
        key_words = [key_words[0] + 0x9E3779B9 & _WORD, key_words[1] + 0xBB67AE85 & _WORD]
    return c0, c1, c2, c3
