"""Functions that stand-ins for tensors may record or replace, as they may torch's own: torch.fx traces them whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from myvision._dispatch.nested import is_nested
from myvision._dispatch.tracing import is_tracing

try:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
except ImportError:
    PLAIN = (Tensor, nn.Parameter)

P = ParamSpec("P")
R = TypeVar("R")


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Calls ``__torch_function__`` of an argument that has one, as torch's own functions do.

    That of nested tensors is passed by: it takes a function for torch's own of the same name.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            if any(is_nested(value) for value in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            return handle_torch_function(call, (*args, *kwargs.values()), *args, **kwargs)
        return function(*args, **kwargs)

    return call


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and of torch's own class, or stands for such a one while a graph is made.

    Those of other classes, such as sharded and quantised ones, know torch's own operators and mostly none besides.
    """
    return type(tensor) in PLAIN and tensor.layout == torch.strided


def may_be_overwritten(tensor: Tensor) -> bool:
    """Whether nobody sees it if an operator writes over a tensor that another one has just returned.

    Not where gradients may be asked for, nor where a mode of torch or the tensor's own class may have kept it. A
    compiler finds by itself whether there are more readers.
    """
    if torch.is_grad_enabled() or is_tracing() or torch.compiler.is_exporting():
        return False
    if torch.compiler.is_compiling():
        return True
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return type(tensor) is Tensor and modes == 0 and not torch._C._are_functorch_transforms_active()
