"""Norms and linear layers take in what follows them, where the graph of a module's ``forward`` shows that they may.

A norm takes in an addition, then an activation; a linear layer an activation, then dropout, then an addition.

Only ``forward`` of the module around them changes: it gets a class of its own, a subclass of the one it had, with the
steps that torch.fx recorded. Where a call is not of the recorded kind, or a hook or another module has come between,
the ``forward`` that the author wrote runs, and its modules do what they always did.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import myvision.nn as ours
from myvision._formulas._activation import activate
from myvision.nn._fold import SLOPE, Activation, activation_of_module, is_replaced, known_activation, linear_step
from myvision.nn.batch_norm import BatchNormForward

NORMS = (
    ours.BatchNorm1d,
    ours.BatchNorm2d,
    ours.BatchNorm3d,
    ours.FrozenBatchNorm2d,
    ours.GroupNorm,
    ours.InstanceNorm1d,
    ours.InstanceNorm2d,
    ours.InstanceNorm3d,
    ours.LayerNorm,
    ours.RMSNorm,
)
LINEARS = (ours.Linear,)
# What these return no one else has.
NEW_MEMORY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, *LINEARS)
Takes = Callable[[fx.Node, fx.Node, dict[str, nn.Module]], bool]  # whether a node is of some kind, after another one
ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}


def fuse(model: nn.Module) -> None:
    """Fuses norms and linear layers in every module of a model that holds some and whose graph can be told."""
    owners = Counter(module for parent in model.modules() for module in parent.children())
    for parent in list(model.modules()):
        if any(type(child) in (*NORMS, *LINEARS) for child in parent.children()):
            fuse_children(parent, owners)


def fuse_children(parent: nn.Module, owners: Counter[nn.Module]) -> None:
    graph = recorded(parent)
    if graph is None:
        return
    modules = dict(parent.named_children())
    fused: set[str] = set()
    for node in list(graph.nodes):
        if step := Step.after(node, modules, owners):
            fused |= step.called
            step.rewrite(graph)
    if fused:
        graph.lint()
        kinds = {name: type(modules[name]) for name in sorted(fused)}
        parent.__class__ = fused_class(type(parent), graph, set(parent._modules), kinds)


# ---- the graph of one module -----------------------------------------------------------------------------------------


class _Proxy(fx.Proxy):
    """Knows operations in place, which torch.fx takes for those that return something new."""


def _in_place(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


IN_PLACE_OPERATORS = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow)
for _operator in IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_operator.__name__}__", _in_place(_operator))


class _Tracer(fx.Tracer):
    """Looks into one module only."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def recorded(module: nn.Module) -> fx.Graph | None:
    """What ``forward`` does, the same in training with gradients and in evaluation without; None where that is not so.

    Its arguments must be such that a call has to give each of them: whether one with a default was given would be
    decided by the recording. And it must set no attribute, as that would be done by the recording alone.
    """
    own = inspect.signature(type(module).forward)
    required = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    known = all(p.kind in required and p.default is p.empty for p in own.parameters.values())
    if not known or "forward" in module.__dict__:
        return None
    before, graphs, is_pure = dict(module.__dict__), [], True
    try:
        for training in (True, False):
            module.training = training
            with torch.set_grad_enabled(training):
                graphs.append(_Tracer().trace(module))
            is_pure &= module.__dict__ == {**before, "training": training}
    except Exception:  # whatever the author's code does when it meets what is no tensor
        return None
    finally:
        module.__dict__.clear()
        module.__dict__.update(before)
    texts = [graph.python_code("self").src for graph in graphs]
    return graphs[0] if is_pure and texts[0] == texts[1] else None


@dataclass(frozen=True)
class Step:
    """A norm or a linear layer, and what it takes in of what follows, of which no one else reads anything.

    A norm may take in nothing where its input is its own, and so can be written to.
    """

    first: fx.Node
    taken: dict[Takes, fx.Node]
    owns_input: bool  # whether a norm reads new memory that no one else reads
    modules: dict[str, nn.Module]

    @staticmethod
    def after(node: fx.Node, modules: dict[str, nn.Module], owners: Counter[nn.Module]) -> Step | None:
        """The step that begins with a node."""
        if not _begins(node, modules, owners):
            return None
        is_norm = type(_module(node, modules)) in NORMS
        taken: dict[Takes, fx.Node] = {}
        last = node
        for takes in (_adds, _activates) if is_norm else (_activates, _drops, _adds):
            reader = _only_reader(last)
            # What adds to a product in place keeps the product's type and shape, as a fused sum may not.
            is_kept = not is_norm and takes is _adds and reader is not None and _writes(reader, modules)
            if reader and takes(reader, last, modules) and not is_kept:
                taken[takes] = last = reader
        input = node.args[0]
        assert isinstance(input, fx.Node)
        owns_input = is_norm and len(input.users) == 1 and type(_module(input, modules)) in NEW_MEMORY
        step = Step(node, taken, owns_input, modules)
        return step if (taken or owns_input) and step.is_undisturbed() else None

    @property
    def nodes(self) -> list[fx.Node]:
        return [self.first, *self.taken.values()]

    @property
    def called(self) -> set[str]:
        """The names of the modules whose calls it takes the place of, and of the one that gives an input it owns."""
        nodes = [*self.nodes, self.first.args[0]] if self.owns_input else self.nodes
        return {str(node.target) for node in nodes if isinstance(node, fx.Node) and node.op == "call_module"}

    def is_undisturbed(self) -> bool:
        """Whether all of it may as well run where it ends: nothing on the way can have written to what it reads."""
        nodes = list(self.first.graph.nodes)
        between = nodes[nodes.index(self.first) + 1 : nodes.index(self.nodes[-1])]
        others = [node for node in between if node not in self.nodes]
        return not any(self.first.args[0] in node.args or _writes(node, self.modules) for node in others)

    def rewrite(self, graph: fx.Graph) -> None:
        *_, last = self.nodes
        activation, dropout = self.taken.get(_activates), self.taken.get(_drops)
        kind = activation_of(activation, self.modules) if activation else None
        with graph.inserting_before(last):
            module, input = graph.get_attr(str(self.first.target)), self.first.args[0]
            if type(_module(self.first, self.modules)) in NORMS:
                arguments = module, input, self._residual(), *(kind or (None, SLOPE)), self.owns_input
                result = graph.call_function(fused_norm, arguments)
            else:
                dropped = graph.get_attr(str(dropout.target)) if dropout else None
                result = graph.call_function(linear_step, (module, input, kind, dropped, self._residual()))
        last.replace_all_uses_with(result)
        for node in reversed(self.nodes):
            graph.erase_node(node)

    def _residual(self) -> Any:
        addition = self.taken.get(_adds)
        return next(arg for arg in addition.args if arg not in self.nodes) if addition else None


def _begins(node: fx.Node, modules: dict[str, nn.Module], owners: Counter[nn.Module]) -> bool:
    """Whether this is the only call of a norm or a linear layer of ours, which no other module holds, of one value."""
    if len(node.args) != 1 or not isinstance(node.args[0], fx.Node) or node.kwargs:
        return False
    module = _module(node, modules)
    if module is None or type(module) not in (*NORMS, *LINEARS):
        return False
    calls = [other for other in node.graph.nodes if other.op == "call_module" and other.target == node.target]
    return owners[module] == len(calls) == 1


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """What a node calls, if that is a module."""
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _writes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(_module(node, modules), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or node.target in IN_PLACE_OPERATORS
    return node.op in ("call_function", "call_method") and (in_place or "out" in node.kwargs)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _adds(node: fx.Node, before: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node is the sum of what the one before gives and of another value, and writes to nothing else."""
    if node.op not in ("call_function", "call_method") or node.target not in ADDITIONS:
        return False
    values = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if len(node.args) != 2 or len(values) != 2 or node.kwargs or values.count(before) != 1:
        return False
    return node.target not in (operator.iadd, "add_") or values[0] is before


def _activates(node: fx.Node, before: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return activation_of(node, modules) is not None


def _drops(node: fx.Node, before: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return type(_module(node, modules)) is nn.Dropout and len(node.args) == 1 and not node.kwargs


def activation_of(node: fx.Node, modules: dict[str, nn.Module]) -> Activation | None:
    """What a node computes of its only argument, if our operators know it."""
    if len(node.args) != 1 or set(node.kwargs) - {"inplace"}:
        return None
    if node.op == "call_module":
        return activation_of_module(_module(node, modules))
    if node.op == "call_method":
        return ("relu", SLOPE) if node.target in ("relu", "relu_") else None
    return known_activation(node.target) if node.op == "call_function" else None


# ---- what runs -------------------------------------------------------------------------------------------------------


def fused_norm(
    norm: Any, x: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float, owns_x: bool
) -> Tensor:
    """``activation(norm(x) + residual)``: in one pass where the two are alike, in x's memory where no one sees it."""
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return activate(norm(x) + residual, activation, negative_slope)
    if owns_x and isinstance(norm, BatchNormForward) and norm.can_overwrite(x):
        return norm.overwrite(x, residual, activation, negative_slope)
    return norm.fused(x, residual, activation, negative_slope)


def fused_class(
    base: type[nn.Module], graph: fx.Graph, names: set[str], kinds: dict[str, type[nn.Module]]
) -> type[nn.Module]:
    """A subclass whose ``forward`` is the graph's, as long as the module has the children that it had.

    Args:
        base: the module's class.
        graph: what runs instead of its ``forward``.
        names: of all of its children.
        kinds: the classes of those whose calls the graph leaves out, or relies on.
    """
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    steps: Callable[..., Any] = namespace["forward"]
    count = sum(node.op == "placeholder" for node in graph.nodes)

    def is_as_recorded(self: Any) -> bool:
        present = self._modules
        return present.keys() == names and all(
            type(present[name]) is kind and not is_replaced(present[name]) for name, kind in kinds.items()
        )

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == count and not kwargs and all(isinstance(arg, Tensor) for arg in args) and is_as_recorded(self):
            return steps(self, *args)
        return base.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _restorable, (base,), state

    looks = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**looks, "forward": forward, "__reduce_ex__": reduce})


def _restorable(base: type[nn.Module]) -> nn.Module:
    """What copying and unpickling fill: once it has its modules, they are fused anew."""

    def set_state(self: Any, state: Any) -> None:
        self.__class__ = base
        self.__setstate__(state)
        fuse_children(self, Counter(self.children()))

    restorable: type[nn.Module] = type(base.__name__, (base,), {"__setstate__": set_state})
    return restorable.__new__(restorable)
