"""How torch.fx records a module of this package: as one call, like the modules of torch.nn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_call = nn.Module.__call__


class _Call:
    """``__call__`` of a leaf: that of ``torch.nn.Module``, but for the time in which a tracer has replaced that one.

    A method with arguments would be one more frame of Python code, the same for all modules: torch.compile takes it for
    one function that changes with every module, and soon gives up compiling it.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return super(Leaf, owner).__call__  # type: ignore[misc]
        call = super(Leaf, module).__call__  # type: ignore[misc]
        return call if call.__func__ is _call else functools.partial(_call_or_record, module, call)


class Leaf:
    """A base to stand before ``torch.nn.Module``: ``torch.fx`` records a call of the module and never looks inside.

    What is inside depends on the mode and on the shapes of the moment, which a trace would freeze. torch's own tracer
    asks for this only of modules whose class is defined in ``torch.nn``. The root of a trace is looked into all the
    same, as torch's modules are.
    """

    __call__ = _Call()


def _call_or_record(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tracer = _tracer_of(*args, *kwargs.values())
    if tracer is None:
        return call(*args, **kwargs)

    def record(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)

    return tracer.call_module(module, record, args, kwargs)


def _tracer_of(*values: Any) -> Any:
    """The tracer for which one of the values stands in for a tensor; None where there is none."""
    for value in values:
        if isinstance(value, torch.fx.Proxy) and isinstance(value.tracer, torch.fx.Tracer):
            return value.tracer
    return None
