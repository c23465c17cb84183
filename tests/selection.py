"""Which of the parametrised tests `make test` runs: a share of each product of dtypes, layouts, options and devices.

A fault shows for some value of an option, or where two values meet: hardly ever does it take three. So of the items of
a test function as many are chosen as it takes for every two values that meet in its whole product to meet still. That
holds for each implementation by itself, as the CPU's kernels have no line in common with the GPU's.

A parameter that is a dataclass, such as a case with its options, takes part with each of its fields, and every case is
run at least once. Numbers and shapes in it count as two values only: the field's default, and another. What is dear and
like others that are chosen has the marker `exhaustive`.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence

import pytest
import torch

Value = tuple[str, Hashable]  # of a parameter, or of a field of one


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The share of these items, in their order. It depends on nothing but the items."""
    products: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        if item.get_closest_marker("exhaustive"):
            continue
        products.setdefault((item.nodeid.partition("[")[0], implementation(item)), []).append(i)
    kept = (members[j] for members in products.values() for j in cover([meetings(items[i]) for i in members]))
    return [items[i] for i in sorted(kept)]


def parameters_of(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def implementation(item: pytest.Item) -> str:
    """What runs: the kernels of the CPU, those of the GPU in the emulator, for any size of warps, or on a GPU."""
    parameters = parameters_of(item)
    return str(parameters.get("device", parameters.get("real_device", ""))).partition("_")[0]


def meetings(item: pytest.Item) -> frozenset[Hashable]:
    """What is to be covered: the test itself, every value of a parameter, and every two of two parameters."""
    parameters = parameters_of(item).items()
    values = [list(values_of(name, parameter)) for name, parameter in parameters]
    pairs = (pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two))
    return frozenset([None, *((name, repr(parameter)) for name, parameter in parameters), *pairs])


def values_of(name: str, parameter: object) -> Iterator[Value]:
    if not dataclasses.is_dataclass(parameter):
        yield name, repr(parameter)
        return
    for field in dataclasses.fields(parameter):
        value = getattr(parameter, field.name)
        named = value is None or isinstance(value, (bool, str, torch.dtype))
        yield f"{name}.{field.name}", value if named else value == field.default


def cover(sets: Sequence[frozenset[Hashable]]) -> Iterator[int]:
    """Some of the sets that have all elements of all sets: in turn the first of those with the most that are new."""
    missing = set().union(*sets)
    queue = [(-len(elements), i) for i, elements in enumerate(sets)]
    heapq.heapify(queue)
    while missing:
        _, i = heapq.heappop(queue)
        entry = (-len(sets[i] & missing), i)  # what counted once can only have become less
        if queue and entry > queue[0]:
            heapq.heappush(queue, entry)
        else:
            missing -= sets[i]
            yield i
