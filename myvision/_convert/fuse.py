"""Norms take in the addition and the activation that follow them, where the graph of a module's ``forward`` shows both.

Only ``forward`` of the module around them changes: it gets a class of its own, a subclass of the one it had, with the
steps that torch.fx recorded. Where a call is not of the recorded kind, or a hook or another module has come between,
the ``forward`` that the author wrote runs, and its norms do what they always did.
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
import torch.nn.functional as F
from torch import Tensor, fx, nn

import myvision.nn as ours
from myvision._formulas._activation import activate
from myvision.nn._transformer import is_replaced
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
# What these return no one else has.
NEW_MEMORY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
SLOPE = 0.01  # of leaky_relu, where nothing tells it
ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys([nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"], "relu"),
    **dict.fromkeys([nn.SiLU, F.silu], "silu"),
    **dict.fromkeys([nn.Hardswish, F.hardswish], "hardswish"),
}

Activation = tuple[str, float]  # the name that our norms know it by, and the slope of leaky_relu


def fuse(model: nn.Module) -> None:
    """Fuses the norms in every module of a model that holds some and whose graph can be told."""
    owners = Counter(module for parent in model.modules() for module in parent.children())
    for parent in list(model.modules()):
        if any(type(child) in NORMS for child in parent.children()):
            fuse_children(parent, owners)


def fuse_children(parent: nn.Module, owners: Counter[nn.Module]) -> None:
    graph = recorded(parent)
    if graph is None:
        return
    modules = dict(parent.named_children())
    fused: set[str] = set()
    for node in list(graph.nodes):
        if step := Step.after(node, modules, owners):
            step.rewrite(graph)
            fused |= step.modules
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
    """A norm, and the addition and the activation after it, of which no one else reads anything.

    There may be neither where the norm's input is its own, and so can be written to.
    """

    norm: fx.Node
    addition: fx.Node | None
    activation: fx.Node | None
    kind: Activation | None
    owns_input: bool  # whether the norm reads new memory that no one else reads
    modules: set[str]  # those whose calls it takes the place of, and who gives the input that it owns

    @staticmethod
    def after(node: fx.Node, modules: dict[str, nn.Module], owners: Counter[nn.Module]) -> Step | None:
        """The step that begins with a node."""
        if not _is_norm(node, modules, owners):
            return None
        addition = _only_reader(node)
        if addition and not _adds(addition, node):
            addition = None
        activation = _only_reader(addition or node)
        kind = activation_of(activation, modules) if activation else None
        if kind is None:
            activation = None
        input = node.args[0]
        assert isinstance(input, fx.Node)
        owns_input = len(input.users) == 1 and type(_module(input, modules)) in NEW_MEMORY
        takes_something = addition or activation or owns_input
        if not takes_something or not _is_undisturbed(node, activation or addition or node, modules):
            return None
        called = [n for n in (node, activation, input if owns_input else None) if n and n.op == "call_module"]
        return Step(node, addition, activation, kind, owns_input, {str(n.target) for n in called})

    def rewrite(self, graph: fx.Graph) -> None:
        last = self.activation or self.addition or self.norm
        with graph.inserting_before(last):
            norm = graph.get_attr(str(self.norm.target))
            kind = self.kind or (None, SLOPE)
            result = graph.call_function(
                fused_norm, (norm, self.norm.args[0], self._residual(), *kind, self.owns_input)
            )
        last.replace_all_uses_with(result)
        for node in (self.activation, self.addition, self.norm):
            if node:
                graph.erase_node(node)

    def _residual(self) -> Any:
        if self.addition is None:
            return None
        return next(arg for arg in self.addition.args if arg is not self.norm)


def _is_norm(node: fx.Node, modules: dict[str, nn.Module], owners: Counter[nn.Module]) -> bool:
    """Whether this is the only call of a norm of ours, which no other module holds, of one value."""
    if len(node.args) != 1 or not isinstance(node.args[0], fx.Node) or node.kwargs:
        return False
    module = _module(node, modules)
    if module is None or type(module) not in NORMS:
        return False
    calls = [other for other in node.graph.nodes if other.op == "call_module" and other.target == node.target]
    return owners[module] == len(calls) == 1


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """What a node calls, if that is a module."""
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _is_undisturbed(norm: fx.Node, last: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether the norm may as well run where its step ends: nothing on the way can have written to what it reads."""
    nodes = list(norm.graph.nodes)
    between = nodes[nodes.index(norm) + 1 : nodes.index(last)]
    return not any(norm.args[0] in node.args or (norm not in node.args and _writes(node, modules)) for node in between)


def _writes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(_module(node, modules), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or node.target in IN_PLACE_OPERATORS
    return node.op in ("call_function", "call_method") and (in_place or "out" in node.kwargs)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _adds(node: fx.Node, norm: fx.Node) -> bool:
    """Whether a node is the sum of what the norm gives and of another value, and writes to nothing else."""
    if node.op not in ("call_function", "call_method") or node.target not in ADDITIONS:
        return False
    values = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if len(node.args) != 2 or len(values) != 2 or node.kwargs or values.count(norm) != 1:
        return False
    return node.target not in (operator.iadd, "add_") or values[0] is norm


def activation_of(node: fx.Node, modules: dict[str, nn.Module]) -> Activation | None:
    """What a node computes of its only argument, if our norms know it."""
    if len(node.args) != 1 or set(node.kwargs) - {"inplace"}:
        return None
    if node.op == "call_module":
        return activation_of_module(_module(node, modules))
    name = ACTIVATIONS.get(node.target)
    return (name, SLOPE) if name and node.op in ("call_function", "call_method") else None


def activation_of_module(module: nn.Module | None) -> Activation | None:
    if type(module) is nn.LeakyReLU:
        return "leaky_relu", module.negative_slope
    if type(module) is nn.GELU:
        return ("gelu" if module.approximate == "none" else "gelu_tanh"), SLOPE
    name = ACTIVATIONS.get(type(module))
    return (name, SLOPE) if name else None


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
