"""python -m myvision ops: the registered operators, as torch's dispatcher knows them."""

from __future__ import annotations

import argparse
from importlib import import_module

import torch

from myvision._dispatch import registry

NAMESPACE = "myvision"
TRAITS = {  # what an operator can take part in: the dispatch keys that provide it
    "autograd": ("Autograd", "AutogradCPU", "CompositeImplicitAutograd"),
    "autocast": ("AutocastCPU", "AutocastCUDA"),
    "vmap": ("FuncTorchBatched",),
    "fake": ("Meta", "CompositeExplicitAutograd"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="list the private operators too")


def run(args: argparse.Namespace) -> int:
    for name in operator_names(private=args.all):
        print(name)
        for topic, value in describe(name).items():
            print(f"  {topic:<10}{value}")
    return 0


def operator_names(private: bool = False) -> list[str]:
    return [name for name in registry.operator_names(NAMESPACE) if private or not name.startswith("_")]


def describe(name: str) -> dict[str, str]:
    """One line of text per topic."""
    devices = [key for key in ("CPU", "CUDA") if has_kernel(name, key)]
    if has_kernel(name, "CompositeExplicitAutograd"):
        devices = ["any"]
    return {
        "schema": str(overload(name)._schema),
        "devices": ", ".join(devices) or "none",
        "dtypes": dtypes(name),
        **{trait: "yes" if any(has_kernel(name, key) for key in keys) else "no" for trait, keys in TRAITS.items()},
    }


def overload(name: str, namespace: str = NAMESPACE) -> torch._ops.OpOverload:
    """The operator of one of these names."""
    operator, _, overload_name = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload_name or "default")


def has_kernel(name: str, dispatch_key: str) -> bool:
    return registry.has_kernel(f"{NAMESPACE}::{name}", dispatch_key)


def dtypes(name: str) -> str:
    """The dispatcher does not know them: they stand beside the operator's fake, which checks them."""
    try:
        module = import_module(f"{NAMESPACE}.ops.{name.partition('.')[0]}")
    except ModuleNotFoundError:
        return "-"
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in module._DTYPES))
