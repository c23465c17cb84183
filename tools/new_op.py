"""Writes every room of a new element-wise operator, which builds and passes its tests at once:

    python tools/new_op.py my_scale "Tensor x, float s" --summary "x times s"

It multiplies its arguments until you change the formula, which stands in the files that the tool lists last. Element
types, memory layouts, broadcasting, derivatives, vmap and export are dealt with. The templates are in tools/new_op/.
"""

from __future__ import annotations

import argparse
import functools
import keyword
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = Path(__file__).resolve().parent / "new_op"
MAX_TENSORS = 5  # kMaxInputs of csrc/common/elementwise_params.h

CPP_TYPES = {"Tensor": "const Tensor&", "float": "double", "int": "int64_t", "bool": "bool"}
EXAMPLES: dict[str, float] = {"float": 0.5, "int": 3, "bool": True}
MEANINGS = {"float": "a number", "int": "an integer", "bool": "a truth value, 1 or 0 in the formula"}
CPP_KEYWORDS = re.compile(  # beyond those that are Python's too
    r"and|auto|case|catch|char|const|decltype|default|delete|do|double|enum|explicit|export|"
    r"extern|float|friend|goto|inline|int|long|mutable|namespace|new|operator|private|"
    r"protected|public|register|short|signed|sizeof|static|struct|switch|template|this|throw|"
    r"typedef|typename|union|unsigned|using|virtual|void|volatile|xor"
)
NAMES_IN_TEMPLATES = {"formula", "mode", "nn", "operands", "output", "params", "self", "stream", "torch", "value"}
WHERE_TO_WRITE = [
    "myvision/_formulas/{op}.py",
    "csrc/ops/{op}/{op}_cpu.cpp",
    "csrc/ops/{op}/{op}_kernel.cuh",
    "myvision/onnx/{op}.py",
]


def fail(message: str) -> NoReturn:
    sys.exit(f"new_op: error: {message}")


@dataclass(frozen=True)
class Argument:
    type: str
    name: str


@dataclass(frozen=True)
class Operator:
    name: str
    arguments: list[Argument]
    summary: str

    @property
    def class_name(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def tensors(self) -> list[Argument]:
        return [argument for argument in self.arguments if argument.type == "Tensor"]

    @property
    def takes_integers(self) -> bool:
        return all(argument.type != "float" for argument in self.arguments)

    @property
    def constants(self) -> list[Argument]:
        return [argument for argument in self.arguments if argument.type != "Tensor"]


# ---- what is asked for -----------------------------------------------------------------------------------------------


def parse_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        fail(f"the name must be lower_case_with_underscores, such as my_scale, but is {name!r}")
    check_word("the name", name)
    if is_used_by_common(name):
        fail(f"the name must not be that of a function in csrc/common, but {name!r} is one")
    return name


def parse_schema(schema: str) -> list[Argument]:
    arguments = [parse_argument(part.strip()) for part in schema.split(",")]
    names = [argument.name for argument in arguments]
    tensors = [argument.type == "Tensor" for argument in arguments]
    if len(set(names)) < len(names):
        fail(f"each argument needs a name of its own, but got {', '.join(names)}")
    if not 1 <= sum(tensors) <= MAX_TENSORS:
        fail(f"an element-wise operator has 1 to {MAX_TENSORS} tensors, but got {sum(tensors)}")
    if tensors != sorted(tensors, reverse=True):
        fail(f"the tensors come first, then the numbers, but got {schema!r}")
    return arguments


def parse_argument(text: str) -> Argument:
    match = re.fullmatch(r"([A-Za-z]+)(\S*) +(\w+)( *=.*)?", text)
    if match is None:
        fail(f'an argument is a type and a name, as in "Tensor x, float s", but got {text!r}')
    kind, suffix, name, default = match.groups()
    if suffix == "?":
        fail(f"{kind}? is for what may be absent, which element-wise operators do not have: make {name} a {kind}")
    if kind not in CPP_TYPES or suffix:
        fail(f"the types are Tensor, float, int and bool, but {name} is {kind}{suffix}")
    if default:
        fail(f"a schema has no defaults: give {name} its own in the Python function, in myvision/ops")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        fail(f"an argument is named in lower case, but got {name!r}")
    check_word("an argument", name)
    return Argument(kind, name)


def check_word(what: str, word: str) -> None:
    if keyword.iskeyword(word) or CPP_KEYWORDS.fullmatch(word):
        fail(f"{what} must not be a word of Python's or C++'s own, but is {word!r}")
    if word in NAMES_IN_TEMPLATES:
        fail(f"{what} must not be {word!r}, which means something else in the files around it")


def is_used_by_common(name: str) -> bool:
    word = re.compile(rf"\b{name}\(")
    return any(word.search(path.read_text()) for path in (ROOT / "csrc" / "common").glob("*.h"))


def check_new(operator: Operator, files: Sequence[Path]) -> None:
    existing = [path for path in files if path.exists()]
    if existing:
        fail(f"{operator.name} exists already: {existing[0].relative_to(ROOT)}")
    if f'"{operator.class_name}"' in (ROOT / "myvision" / "nn" / "__init__.py").read_text():
        fail(f"a module named {operator.class_name} exists already in myvision.nn")


# ---- what the templates are filled with ------------------------------------------------------------------------------


def lines(indent: int, texts: Sequence[str]) -> str:
    """Each on a line of its own, the last with its end too; nothing of nothing."""
    return "".join(f"{' ' * indent}{text}\n" for text in texts)


def substitutions(operator: Operator) -> dict[str, str]:
    return {
        "op": operator.name,
        "Op": operator.class_name,
        "summary": operator.summary,
        **shared_substitutions(operator),
        **cpp_substitutions(operator),
        **python_substitutions(operator),
        **module_substitutions(operator),
    }


def shared_substitutions(operator: Operator) -> dict[str, str]:
    arguments, tensors = operator.arguments, operator.tensors
    return {
        "schema": ", ".join(f"{argument.type} {argument.name}" for argument in arguments),
        "count": str(len(tensors)),
        "first": tensors[0].name,
        "numbers": "FloatingAndInteger" if operator.takes_integers else "Floating",
        "integers": ", integers=True" if operator.takes_integers else "",
        "dtypes": "float64, float32, float16, bfloat16"
        + (", int64, int32, int16, int8, uint8 and bool" if operator.takes_integers else ""),
        "formula": " * ".join(argument.name for argument in arguments),
        "constants": "".join(f"{EXAMPLES[argument.type]}, " for argument in operator.constants),
        # torch finds no kernel for a call without any tensor.
        "none_case": lines(8, [f'(None, r"^{operator.name}: {tensors[0].name} must be a tensor, but is None$"),'])
        if len(tensors) > 1
        else "",
        "flops": str(max(1, len(arguments) - 1)),
        "moved_bytes": str(4 * (len(tensors) + 1)),
    }


def cpp_substitutions(operator: Operator) -> dict[str, str]:
    tensors, constants = operator.tensors, operator.constants
    members = lines(2, [f"{CPP_TYPES[argument.type]} {argument.name};" for argument in constants])
    return {
        "cpp_parameters": ", ".join(f"{CPP_TYPES[argument.type]} {argument.name}" for argument in operator.arguments),
        "members": f"\n{members}" if members else "",
        "set_members": lines(2, [f"params.{argument.name} = {argument.name};" for argument in constants]),
        "from_params": ", ".join(f"params.{argument.name}" for argument in constants),
        "captures": ", ".join(f"{argument.name} = params.{argument.name}" for argument in constants),
        "operands": ", ".join(f'{{"{argument.name}", {argument.name}}}' for argument in tensors),
        "vectors": ", ".join(f"const T& {argument.name}" for argument in tensors),
        "values": ", ".join(f"T {argument.name}" for argument in tensors),
        "product": " * ".join(
            [*(argument.name for argument in tensors), *(f"T({argument.name})" for argument in constants)]
        ),
    }


def python_substitutions(operator: Operator) -> dict[str, str]:
    arguments, tensors = operator.arguments, [argument.name for argument in operator.tensors]
    described = {
        argument.name: "a tensor of any shape that broadcasts with those of the others"
        if argument.type == "Tensor"
        else MEANINGS[argument.type]
        for argument in arguments
    }
    factors = [*tensors[1:], *(f"constant(op, {argument.name}, like={tensors[0]})" for argument in operator.constants)]
    used = (["constant"] if operator.constants else []) + (["promoted"] if len(tensors) > 1 else [])
    promote = [f"{', '.join(tensors)} = promoted(op, {', '.join(tensors)})"] if len(tensors) > 1 else []
    types = {argument.name: "Value" if argument.type == "Tensor" else argument.type for argument in arguments}
    return {
        "py_parameters": ", ".join(f"{argument.name}: {argument.type}" for argument in arguments),
        "names": ", ".join(argument.name for argument in arguments),
        "documented": lines(8, [f"{name}: {text}." for name, text in described.items()]).rstrip(),
        "tensors_by_name": ", ".join(f'"{name}": {name}' for name in tensors),
        "onnx_parameters": ", ".join(f"{name}: {kind}" for name, kind in types.items()),
        "onnx_import": ", ".join(["Opset", "Value", *used]),
        "onnx_lines": lines(4, promote),
        "onnx_product": functools.reduce("op.Mul({}, {})".format, factors, tensors[0])
        if factors
        else f"op.Identity({tensors[0]})",
    }


def module_substitutions(operator: Operator) -> dict[str, str]:
    tensors, constants = [argument.name for argument in operator.tensors], operator.constants
    examples = [f"{EXAMPLES[argument.type]}" for argument in constants]
    tensor_ones = ", ".join("torch.ones(2)" for _ in tensors)
    product = 1.0
    for argument in constants:
        product *= EXAMPLES[argument.type]
    number = f"{product:.0f}." if product.is_integer() else f"{product:.4f}"
    init = [f"self.{argument.name} = {argument.name}" for argument in constants]
    parameters = ", ".join(f"{argument.name}: {argument.type}" for argument in constants)
    documented = [f"{argument.name}: {MEANINGS[argument.type]}." for argument in constants]
    shown = ", ".join(f"{argument.name}={{self.{argument.name}}}" for argument in constants)
    return {
        "ones": ", ".join([tensor_ones, *examples]),
        "ones_result": f"tensor([{number}, {number}])",
        "tensor_ones": tensor_ones,
        "module_examples": ", ".join(examples),
        "module_arguments": f"\n    Args:\n{lines(8, documented)}" if constants else "",
        "module_init": f"\n    def __init__(self, {parameters}) -> None:\n"
        f"{lines(8, ['super().__init__()', *init])}\n"
        f'    def extra_repr(self) -> str:\n        return f"{shown}"\n'
        if constants
        else "",
        "module_call": ", ".join([*tensors, *(f"self.{argument.name}" for argument in constants)]),
        "tensor_parameters": ", ".join(f"{name}: Tensor" for name in tensors),
        "shapes": ", ".join(f"``{name}``" for name in tensors)
        + (": any shapes that broadcast together" if len(tensors) > 1 else ": any shape"),
    }


# ---- what is written -------------------------------------------------------------------------------------------------


def new_files(operator: Operator) -> dict[Path, str]:
    values = substitutions(operator)
    return {
        ROOT / str(path.relative_to(TEMPLATES)).replace("OP", operator.name).removesuffix(".in"): Template(
            path.read_text()
        ).substitute(values)
        for path in sorted(TEMPLATES.rglob("*.in"))
    }


def changed_files(operator: Operator) -> dict[Path, str]:
    """The lists in which an operator has an entry."""
    op, class_name = operator.name, operator.class_name
    ops, nn = (ROOT / "myvision" / package / "__init__.py" for package in ("ops", "nn"))
    readme, changelog, gpu = ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "tests" / "test_gpu.py"
    tensors = ", ".join("(300, 70)" for _ in operator.tensors)
    arguments = "".join(f", {EXAMPLES[argument.type]}" for argument in operator.constants)
    call = f'    "{op}": Call(tensors({tensors}), lambda inputs: myvision.ops.{op}(*inputs{arguments})),\n'
    return {
        ops: exported(ops.read_text(), f"from myvision.ops.{op} import {op}", op),
        nn: exported(nn.read_text(), f"from myvision.nn.{op} import {class_name}", class_name),
        readme: with_row(readme.read_text(), operator),
        changelog: after_last(changelog.read_text(), r"- `my_add`.*\n", f"- `{op}`: {operator.summary}.\n"),
        gpu: after_last(gpu.read_text(), r'    "my_add.*": Call\(.*\n', call),
    }


def exported(text: str, statement: str, name: str) -> str:
    """A package's __init__ with one more name, its imports and __all__ in order."""
    text = with_import(text, statement).replace("__all__ = [\n", f'__all__ = [\n    "{name}",\n')
    names = r'(?<=__all__ = \[\n)(?:    ".*",\n)+'
    return re.sub(names, lambda match: "".join(sorted(match[0].splitlines(keepends=True))), text, count=1)


def with_import(text: str, statement: str) -> str:
    """The text with an import before that of the next module in the alphabet, or behind all."""
    for later in re.finditer(r"^from myvision\.\S+", text, re.MULTILINE):
        if later[0] > statement:
            return f"{text[: later.start()]}{statement}\n{text[later.start() :]}"
    return after_last(text, r"from myvision\.(?:.*\(\n(?:    .*\n)+\)|.*)\n", f"{statement}\n")


def after_last(text: str, line: str, addition: str) -> str:
    """The text with an addition behind the last line of a kind."""
    found = list(re.finditer(f"^{line}", text, re.MULTILINE))
    if not found:
        fail(f"no line matches {line!r}, behind which {addition.strip()!r} would stand")
    end = found[-1].end()
    return text[:end] + addition + text[end:]


def with_row(readme: str, operator: Operator) -> str:
    """README with the operator in its table, whatever the columns are."""
    table = re.search(r"^\| *operator .*\n\|.*\n", readme, re.MULTILINE)
    if table is None:
        fail("README.md has no table whose first column is headed 'operator'")
    known = {
        "operator": f"`ops.{operator.name}`",
        "module": f"`nn.{operator.class_name}`",
        "what it computes": operator.summary,
        "dtypes": "floating"
        if any(argument.type == "float" for argument in operator.arguments)
        else "floating, integer",
    }
    columns = [column.strip() for column in table[0].splitlines()[0].strip("|").split("|")]
    return after_last(readme, r"\| `ops\.my_add`.*\n", f"| {' | '.join(known.get(name, '') for name in columns)} |\n")


def format_files(files: Sequence[Path]) -> None:
    """As `make lint` wants them, where its tools are installed."""
    for tool, options, suffixes in (
        ("ruff", ["format", "--quiet"], {".py"}),
        ("clang-format", ["-i"], {".h", ".cpp", ".cuh", ".cu"}),
    ):
        named = [str(path) for path in files if path.suffix in suffixes]
        beside = Path(sys.executable).parent / tool
        program = str(beside) if beside.is_file() else shutil.which(tool)
        if program:
            subprocess.run([program, *options, *named], cwd=ROOT, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="lower_case_with_underscores")
    parser.add_argument("schema", help='tensors first, then numbers (float, int, bool): "Tensor x, float s"')
    parser.add_argument("--summary", help='what it computes, for documentation; default: "the product of x and s"')
    args = parser.parse_args(argv)
    arguments = parse_schema(args.schema)
    names = [argument.name for argument in arguments]
    product = f"the product of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"a copy of {names[0]}"
    operator = Operator(parse_name(args.name), arguments, args.summary or product)
    written = new_files(operator)
    check_new(operator, list(written))
    changed = changed_files(operator)
    for path, text in {**written, **changed}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    format_files([*written, *changed])
    print("written:", *(f"  {path.relative_to(ROOT)}" for path in written), sep="\n")
    print("an entry in:", *(f"  {path.relative_to(ROOT)}" for path in changed), sep="\n")
    print("now: make build, then .venv/bin/python -m pytest tests/test_" + operator.name + ".py")
    print("the formula stands in:", *(f"  {path.format(op=operator.name)}" for path in WHERE_TO_WRITE), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
