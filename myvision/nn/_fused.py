"""An activation that is part of a norm."""

from __future__ import annotations

import sys
from typing import Any

import torch

from myvision.ops._norm import ACTIVATIONS

# What in torch reads a norm's eps to compute or to fold that norm by itself, and knows nothing of its activation:
# convert_sync_batchnorm, the encoder's fast path, fuse_conv_bn_eval and fuse_linear_bn_eval, to_mkldnn, quantisation.
_TAKES_NORMS_APART = (
    "torch.ao.",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.transformer",
    "torch.nn.utils.fusion",
    "torch.utils.mkldnn",
)


class FusedActivation:
    """A base to stand before torch's module: adds ``activation`` and ``negative_slope`` to its constructor.

    Utilities of torch that would lose the activation raise instead: all of them read ``eps``.
    """

    activation: str | None
    negative_slope: float

    def __init__(self, *args: Any, activation: str | None = None, negative_slope: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if activation is not None and activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activation must be one of None, {known}, but is {activation!r}")
        self.activation = activation
        self.negative_slope = negative_slope

    @property
    def eps(self) -> Any:  # of an RMSNorm it may be None
        if not torch.compiler.is_compiling():
            reader = sys._getframe(1)
            if reader.f_globals.get("__name__", "").startswith(_TAKES_NORMS_APART) and self._extras():
                raise RuntimeError(
                    f"{reader.f_code.co_name} would drop {self._extras()} of {self}. Leave it out of the norm, with a "
                    "module of its own for an activation; to synchronise batch norms, use "
                    "myvision.nn.SyncBatchNorm.convert_sync_batchnorm."
                )
        return self.__dict__["eps"]

    @eps.setter
    def eps(self, value: float) -> None:
        self.__dict__["eps"] = value

    def _extras(self) -> str:
        """What this norm does beyond torch's; nothing, if empty."""
        if self.activation is not None:
            return f"the activation {self.activation!r}"
        return "channels='first'" if getattr(self, "channels", "last") == "first" else ""

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        return text + self._activation_repr()

    def _activation_repr(self) -> str:
        if self.activation is None:
            return ""
        slope = f", negative_slope={self.negative_slope}" if self.activation == "leaky_relu" else ""
        return f", activation={self.activation!r}{slope}"
