"""The command line: python -m myvision COMMAND."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Command: its module, imported only when called, and what it does.
COMMANDS = {
    "env": ("myvision._cli.env", "show versions, the instruction set in use, what was built, and the GPUs"),
    "ops": ("myvision._cli.ops", "list the operators: schema, devices, dtypes, autograd"),
    "graph": ("myvision._cli.graph", "list the operator nodes of a .pt, .pt2 or .onnx file"),
    "bench": ("myvision._cli.bench", "measure the operators beside their peers"),
    "demo": ("myvision._cli.demo", "train, save, reload and export a small network with deformable convolutions"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m myvision", description="Fast operators for PyTorch.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if arguments and arguments[0] == name:
            module = import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
