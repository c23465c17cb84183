"""The share of the tests that is chosen: what it covers, and that it leaves out the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import REPOSITORY, load_script
from selection import chosen, implementation, meetings


def item(*markers: str, **parameters: Any) -> Any:
    return SimpleNamespace(
        nodeid=f"test_it[{parameters}]",
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=lambda name: name in markers,
    )


def product(**values: Sequence[Any]) -> list[Any]:
    return [item(**dict(zip(values, some, strict=True))) for some in itertools.product(*values.values())]


@dataclass(frozen=True)
class Case:
    size: int = 7
    mode: str = "plain"


def test_every_two_values_meet_for_each_implementation() -> None:
    devices = ["cpu", "emulated", "emulated_64", "cuda"]
    items = product(dtype=range(4), layout=range(5), option=range(3), flag=[False, True], device=devices)
    share = chosen(items)
    for name in ("cpu", "emulated", "cuda"):
        some, all_of_it = ([it for it in tests if implementation(it) == name] for tests in (share, items))
        assert frozenset().union(*map(meetings, some)) == frozenset().union(*map(meetings, all_of_it))
        assert len(some) <= 3 * 4 * 5 // 2
    assert share == [it for it in items if it in share]
    assert share == chosen(items)


def test_a_case_counts_by_its_fields() -> None:
    cases = [Case(), *(Case(size=size) for size in range(6)), Case(mode="causal")]
    share = chosen(product(case=cases, dtype=range(4)))
    parameters = [it.callspec.params for it in share]
    assert {each["case"] for each in parameters} == set(cases)
    met = {(each["case"].size == 7, each["case"].mode, each["dtype"]) for each in parameters}
    assert {(mode, dtype) for _, mode, dtype in met} == set(itertools.product(["plain", "causal"], range(4)))
    assert {(default, dtype) for default, _, dtype in met} == set(itertools.product([False, True], range(4)))
    assert len(share) < 16


def test_what_has_no_parameters_is_chosen() -> None:
    alone = item()
    assert chosen([alone]) == [alone]


def test_what_is_exhaustive_is_left_out() -> None:
    items = [item("exhaustive", opset=18), item(opset=20)]
    assert chosen(items) == items[1:]


MUTATIONS = load_script(REPOSITORY / "tools" / "mutations.py").MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.path)
def test_every_fault_to_plant_has_its_place(mutation: Any) -> None:
    assert (REPOSITORY / mutation.path).read_text().count(mutation.before) == 1
    assert mutation.before != mutation.after
    assert all((REPOSITORY / "tests" / f"test_{name}.py").is_file() for name in mutation.tests.split())
