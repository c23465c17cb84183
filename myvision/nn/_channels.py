"""Where a layer or RMS norm finds the channels that share a mean."""

from __future__ import annotations

from typing import Any, Literal

Channels = Literal["last", "first"]


class NormalisesChannels:
    """A base to stand before torch's module: adds ``channels`` to its constructor."""

    normalized_shape: tuple[int, ...]
    channels: Channels

    def __init__(self, *args: Any, channels: Channels = "last", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if channels not in ("first", "last"):
            raise ValueError(f"channels must be 'first' or 'last', but is {channels!r}")
        if channels == "first" and len(self.normalized_shape) != 1:
            raise ValueError(f"channels='first' needs one number as normalized_shape, got {self.normalized_shape}")
        self.channels = channels

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        return text if self.channels == "last" else f"{text}, channels='first'"
