"""Count the operators in the code of a TorchScript archive by reading it: nothing of it is executed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_UNRESOLVED = "prim::CallMethod"  # a method of a value whose class the code does not name


def count_operators(sources: Mapping[str, str], root: str) -> Counter[str]:
    """Count the operator nodes that the ``forward`` of a module reaches, with those of the modules it calls.

    A module that is called twice counts twice; both branches of an ``if`` count, and a loop's body counts once.

    Args:
        sources: qualified name of each source file, such as ``__torch__.torch.nn.modules.conv``, and its text.
        root: qualified name of the module's class.

    Raises:
        ValueError: ``root`` has no ``forward``, or a method calls itself.
        SyntaxError: a text is not code.
    """
    code = _Code(sources)
    forward = code.method(root, "forward")
    if forward is None:
        raise ValueError(f"{root} has no method forward")
    return code.count(forward)


@dataclass
class _Class:
    attributes: dict[str, str | None] = field(default_factory=dict)  # name: qualified name of its class
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)


class _Code:
    """The classes and functions of an archive, and the operators below each function."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.classes: dict[str, _Class] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self._counts: dict[ast.FunctionDef, Counter[str] | None] = {}  # None while it is being counted
        for module, text in sources.items():
            for statement in ast.parse(text).body:
                if isinstance(statement, ast.FunctionDef):
                    self.functions[f"{module}.{statement.name}"] = statement
                elif isinstance(statement, ast.ClassDef):
                    self.classes[f"{module}.{statement.name}"] = _read_class(statement)

    def method(self, class_name: str | None, name: str) -> ast.FunctionDef | None:
        owner = self.classes.get(class_name or "")
        return owner.methods.get(name) if owner else None

    def attribute(self, class_name: str | None, name: str) -> str | None:
        owner = self.classes.get(class_name or "")
        return owner.attributes.get(name) if owner else None

    def count(self, function: ast.FunctionDef) -> Counter[str]:
        if function not in self._counts:
            self._counts[function] = None
            body = _Body(self, function)
            body.generic_visit(function)
            self._counts[function] = body.operators
        counts = self._counts[function]
        if counts is None:
            raise ValueError(f"{function.name} calls itself")
        return counts


def _read_class(definition: ast.ClassDef) -> _Class:
    result = _Class()
    for statement in definition.body:
        match statement:
            case ast.FunctionDef(name=name):
                result.methods[name] = statement
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                result.attributes[name] = _dotted(annotation)
            # Names that are no identifiers, as those of the modules in a Sequential.
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="__annotations__"), slice=ast.Constant(value=str(name)))]
            ):
                result.attributes[name] = _dotted(statement.value)
    return result


class _Body(ast.NodeVisitor):
    """Walks one function in the order of its source, follows what its variables stand for and counts operators."""

    def __init__(self, code: _Code, function: ast.FunctionDef) -> None:
        self.code = code
        self.operators: Counter[str] = Counter()
        # Variable: qualified name of its class, or of the function that it is.
        self.variables = {argument.arg: _dotted(argument.annotation) for argument in function.args.args}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.variables[target.id] = self._name_of(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        match (_dotted(node.func) or "").split("."):
            case ["torch", name]:
                self.operators[f"aten::{name}"] += 1
            case ["ops", namespace, name]:
                self.operators[f"{namespace}::{name}"] += 1
            case _:
                self.operators += self._count_called(node.func)

    def _count_called(self, called: ast.expr) -> Counter[str]:
        """The operators of a function or method of the archive; none for a built-in such as int."""
        function = self.code.functions.get(self._name_of(called) or "")
        if function is None and isinstance(called, ast.Attribute) and called.attr != "__new__":
            function = self.code.method(self._name_of(called.value), called.attr)
            if function is None:
                return Counter([_UNRESOLVED])
        return self.code.count(function) if function else Counter()

    def _name_of(self, value: ast.expr) -> str | None:
        """Qualified name of a value's class, or of the function that it is; None where the code does not tell."""
        match value:
            case ast.Attribute() if (path := _dotted(value) or "").startswith("__torch__."):
                return path
            case ast.Name(id=name):
                return self.variables.get(name)
            case ast.Attribute(value=owner, attr=name):
                return self.code.attribute(self._name_of(owner), name)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))]):
                return self.code.attribute(self._name_of(owner), name)
            case ast.Call(func=ast.Name(id="annotate" | "unchecked_cast"), args=[annotation, _]):
                return _dotted(annotation)
            case ast.Call(func=ast.Attribute(value=created, attr="__new__")):
                return _dotted(created)
        return None


def _dotted(expression: ast.expr | None) -> str | None:
    """The text of a name such as a.b.c, None for any other expression."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    return ".".join([expression.id, *reversed(names)]) if isinstance(expression, ast.Name) else None
