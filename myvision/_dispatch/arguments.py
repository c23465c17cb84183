"""An operator's arguments by name, as its schema has them: nothing that is written for an operator counts positions."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any


@functools.cache
def arguments_of(op: Any) -> Any:
    """The named tuple of an operator's arguments, made of its schema.

    What is left out is None, so that it says the gradients of arguments as well.

    Args:
        op: the operator, for example ``torch.ops.myvision.my_add.default``.

    Example::

        >>> import myvision, torch
        >>> from myvision._dispatch.arguments import arguments_of
        >>> MyAdd = arguments_of(torch.ops.myvision.my_add.default)
        >>> MyAdd("first", "second").y
        'second'
        >>> tuple(MyAdd(y="gradient"))
        (None, 'gradient')
    """
    names = [argument.name for argument in op._schema.arguments]
    title = op._schema.name.partition("::")[2].title().replace("_", "")
    return namedtuple(title, names, defaults=[None] * len(names))


def needs_of(arguments: Any, ctx: Any) -> Any:
    """Which arguments need a gradient, by name.

    Args:
        arguments: what ``arguments_of`` returned.
        ctx: the context of an autograd function; one of torch.func's levels has an input more than the operator.
    """
    return arguments._make(ctx.needs_input_grad[: len(arguments._fields)])


def call_by_name(function: Callable[..., Any], arguments: Any, **others: Any) -> Any:
    """Calls a function with those of the arguments, a named tuple, that it has parameters for.

    Args:
        function: it may have fewer parameters, in another order.
        arguments: an instance of what ``arguments_of`` returned.
        **others: what takes the place of arguments of these names, or comes on top.
    """
    given = arguments._asdict() | others
    return function(**{name: given[name] for name in _parameters(function)})


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
