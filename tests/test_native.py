"""The kernels that need no torch, by themselves: tests/native/native.cpp brings them to Python, one instruction set a
module. It is built here, into build/native, and only when something it is made of has changed.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pybind11
import pytest
import torch
from filelock import FileLock
from helpers import (
    FLOATING_DTYPES,
    INSTRUCTION_SETS,
    REPOSITORY,
    available_instruction_sets,
    load_script,
    run_python,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import cpp_extension

DTYPES = [torch.float64, torch.float32]  # those computed in
Memory = Callable[[int, torch.dtype], Tensor]  # at least so many elements, each 7

setup_script = load_script(REPOSITORY / "setup.py")
if not Path(sysconfig.get_path("include"), "Python.h").is_file():
    pytest.skip("a pybind11 module needs Python's headers: install python3-dev", allow_module_level=True)


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def build(instruction_set: str) -> ModuleType:
    """native.cpp for one instruction set, loaded; compiled as the kernels are, but in half of the time."""
    directory = REPOSITORY / "build" / "native" / instruction_set
    directory.mkdir(parents=True, exist_ok=True)
    setup_script.find_ninja()
    flags = setup_script.flags_of(setup_script.check_compiler()).kernels(
        instruction_set.upper(), "tests/native/native.cpp"
    )
    built = [] if instruction_set == "default" else ["-DMYVISION_CPU_X86"]
    with FileLock(directory / "build.lock"):
        (directory / "lock").unlink(missing_ok=True)  # torch's own, which outlives a build that was killed
        return cpp_extension.load(
            f"native_{instruction_set}",
            [str(REPOSITORY / "tests/native/native.cpp"), str(REPOSITORY / "csrc/common/cpu_capability.cpp")],
            extra_cflags=[*flags, *built, "-Og"],
            extra_include_paths=[str(REPOSITORY / "csrc"), pybind11.get_include()],
            build_directory=str(directory),
        )


@pytest.fixture(scope="session", params=available_instruction_sets())
def native(request: pytest.FixtureRequest) -> ModuleType:
    return build(request.param)


def instruction_set_of(native: ModuleType) -> str:
    return native.__name__.removeprefix("native_")


def ordinary_memory(count: int, dtype: torch.dtype) -> Tensor:
    """With a border that must stay as it is."""
    return torch.full((count + 64,), 7, dtype=dtype)


def guarded_memory(count: int, dtype: torch.dtype) -> Tensor:
    """Where it ends a page begins that nobody may touch: an access there ends the process."""
    size = count * dtype.itemsize
    usable = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, usable + mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + usable
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=usable - size).fill_(7)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


# ---- matrix product --------------------------------------------------------------------------------------------------


def check_gemm(
    native: ModuleType, function: str, dtype: torch.dtype, rows: int, depth: int, memory: Memory = ordinary_memory
) -> None:
    """Every way to lay out the operands, against numpy in float64."""
    kernels = getattr(native, name_of(dtype))
    columns = kernels.tile_columns
    for transposed, packed, accumulate in itertools.product([False, True], repeat=3):
        a_strides = (1, rows + 3) if transposed else (depth + 3, 1)
        b_strides = (columns if packed else columns + 5, 1)
        c_strides = (columns + 2, 1)
        a, b, c = (
            memory(max(extent(shape, strides), 1), dtype).normal_()
            for shape, strides in [
                ((rows, depth), a_strides),
                ((depth, columns), b_strides),
                ((rows, columns), c_strides),
            ]
        )
        left = a.as_strided((rows, depth), a_strides).double().numpy()
        right = b.as_strided((depth, columns), b_strides).double().numpy()
        expected = c.to(torch.float64, copy=True)
        product = expected.as_strided((rows, columns), c_strides).numpy()
        magnitude = np.abs(left) @ np.abs(right) + np.abs(product)
        product[:] = left @ right + (product if accumulate else 0)

        getattr(kernels, function)(
            a.data_ptr(), *a_strides, b.data_ptr(), b_strides[0], rows, depth, c.data_ptr(), c_strides[0], accumulate
        )

        bound = torch.zeros_like(expected)  # outside the tile nothing may change
        bound.as_strided((rows, columns), c_strides).copy_(torch.from_numpy(magnitude))
        error = (c.double() - expected).abs()
        assert (error <= (depth + 1) * torch.finfo(dtype).eps * bound).all(), f"{transposed=}, {packed=}, {accumulate=}"


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gemm_tile_of_every_height(native: ModuleType, dtype: torch.dtype, depth: int) -> None:
    for rows in range(1, getattr(native, name_of(dtype)).tile_rows + 1):
        check_gemm(native, "gemm_tile", dtype, rows, depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gemm_panel_of_every_remainder(native: ModuleType, dtype: torch.dtype, depth: int) -> None:
    for rows in range(1, 3 * getattr(native, name_of(dtype)).tile_rows + 2):
        check_gemm(native, "gemm_panel", dtype, rows, depth)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_full_tile_is_its_rows_bit_for_bit(
    native: ModuleType, dtype: torch.dtype, transposed: bool, accumulate: bool
) -> None:
    """The tile written in assembly computes what the portable template, which does each row here, computes."""
    kernels = getattr(native, name_of(dtype))
    rows, columns, depth = kernels.tile_rows, kernels.tile_columns, 301
    row, step = (1, rows) if transposed else (depth, 1)
    a, b = torch.randn(rows * depth, dtype=dtype), torch.randn(depth * columns, dtype=dtype)
    full = torch.randn(rows, columns, dtype=dtype)
    single = full.clone()
    shared = (b.data_ptr(), columns)
    kernels.gemm_tile(a.data_ptr(), row, step, *shared, rows, depth, full.data_ptr(), columns, accumulate)
    for i in range(rows):
        kernels.gemm_tile(a[i * row :].data_ptr(), row, step, *shared, 1, depth, single[i].data_ptr(), 1, accumulate)
    assert torch.equal(full, single)


# ---- loads, stores, transposes ---------------------------------------------------------------------------------------


def check_copy(
    copy: Callable[[int, int], None],
    shape: Sequence[int],
    source: tuple[torch.dtype, Sequence[int]],
    target: tuple[torch.dtype, Sequence[int]],
    memory: Memory,
) -> None:
    """copy(address, address) copies exactly the elements of a source of this dtype and strides to such a target."""
    given_values = memory(extent(shape, source[1]), source[0]).normal_()
    result = memory(extent(shape, target[1]), target[0])
    expected = result.clone()
    expected.as_strided(shape, target[1]).copy_(given_values.as_strided(shape, source[1]))
    copy(given_values.data_ptr(), result.data_ptr())
    assert torch.equal(result, expected), f"{shape=}, {source=}, {target=}"


def check_rows(native: ModuleType, dtype: torch.dtype, memory: Memory = ordinary_memory) -> None:
    kernels, computed = getattr(native, name_of(dtype)), torch.promote_types(dtype, torch.float32)
    for n, from_stride, to_stride in itertools.product([1, 2, 7, 8, 15, 16, 17, 33], [1, 3], [1, 2]):
        for direction, source, target in [(kernels.load, dtype, computed), (kernels.store, computed, dtype)]:
            check_copy(
                lambda a, b: direction.copy_row(a, from_stride, n, b, to_stride),  # noqa: B023
                [n],
                (source, [from_stride]),
                (target, [to_stride]),
                memory,
            )


def check_transposes(native: ModuleType, dtype: torch.dtype, memory: Memory = ordinary_memory) -> None:
    kernels, computed = getattr(native, name_of(dtype)), torch.promote_types(dtype, torch.float32)
    for rows, columns, gap in itertools.product([1, 5, 8, 16, 19], [1, 3, 8, 16, 35], [0, 3]):
        for direction, source, target in [(kernels.load, dtype, computed), (kernels.store, computed, dtype)]:
            check_copy(
                lambda a, b: direction.transpose(a, columns + gap, rows, columns, b, rows + gap),  # noqa: B023
                [rows, columns],
                (source, [columns + gap, 1]),
                (target, [1, rows + gap]),
                memory,
            )


def check_pixels(native: ModuleType, dtype: torch.dtype, memory: Memory = ordinary_memory) -> None:
    """Channels first, channels last, and neither."""
    kernels, computed = getattr(native, name_of(dtype)), torch.promote_types(dtype, torch.float32)
    for channels, pixels, gap in itertools.product([1, 5, 8, 17], [1, 6, 16, 21], [0, 3]):
        pitch = channels + gap
        for strides in [(pixels + gap, 1), (1, channels + gap), (2 * (pixels + gap), 2)]:
            shape, tensor, slices = [channels, pixels], (dtype, strides), (computed, (1, pitch))
            load = lambda a, b: kernels.load_pixels(a, *strides, channels, pixels, b, pitch)  # noqa: B023, E731
            store = lambda a, b: kernels.store_pixels(a, pitch, channels, pixels, b, *strides)  # noqa: B023, E731
            check_copy(load, shape, tensor, slices, memory)
            check_copy(store, shape, slices, tensor, memory)


@pytest.mark.parametrize("check", [check_rows, check_transposes, check_pixels])
def test_copies_of_any_size_and_stride(
    native: ModuleType, floating_dtype: torch.dtype, check: Callable[[ModuleType, torch.dtype], None]
) -> None:
    check(native, floating_dtype)


def check_ends(instruction_set: str) -> None:
    native = build(instruction_set)
    for dtype in FLOATING_DTYPES:
        for check in (check_rows, check_transposes, check_pixels):
            check(native, dtype, guarded_memory)
    for dtype in DTYPES:
        for rows, depth in itertools.product(range(1, getattr(native, name_of(dtype)).tile_rows + 2), [1, 5]):
            check_gemm(native, "gemm_panel", dtype, rows, depth, guarded_memory)


def test_nothing_past_the_ends_is_touched(native: ModuleType) -> None:
    run_python(f"import test_native; test_native.check_ends({instruction_set_of(native)!r})")


# ---- sampling positions ----------------------------------------------------------------------------------------------

POSITIONS = [0.0, -0.0, 0.25, -0.5, -1.0, -1.5, -2.0, 4.0, 4.5, 4.875, 5.0, 5.5, 6.0, 1e30, -1e30, 2.0**31, -(2.0**31)]
BESIDE_THE_ENDS = np.nextafter(np.float32([-1, -1, 5, 5]), np.float32([-2, 0, 4, 6])).tolist()


@given(
    positions=st.lists(st.floats(width=32) | st.floats(-8, 48, width=32), min_size=1, max_size=40),
    size=st.integers(1, 40),
)
@example(positions=[*POSITIONS, *BESIDE_THE_ENDS, math.nan, math.inf, -math.inf], size=5)
@example(positions=[2.0**24 - 1, 2.0**24, -1.0], size=2**24)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_axis_samples(native: ModuleType, dtype: torch.dtype, positions: list[float], size: int) -> None:
    """In vectors, one by one and by hand: all the same."""

    def by_hand(position: float) -> tuple[int, float, bool]:
        if not -1 <= position < size:
            return -1, 0, False
        low = math.floor(position)
        return low, torch.tensor(position - low, dtype=dtype).item(), True

    kernels = getattr(native, name_of(dtype))
    expected = [by_hand(position) for position in positions]
    assert kernels.axis_samples_one_by_one(positions, size) == expected
    assert kernels.axis_samples_in_vectors(positions, size) == expected


# ---- how deform_conv2d cuts its work ---------------------------------------------------------------------------------


@st.composite
def layout_arguments(draw: st.DrawFn) -> dict[str, int]:
    groups, offset_groups = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return {
        "channels": math.lcm(groups, offset_groups) * draw(st.integers(1, 60)),
        "groups": groups,
        "offset_groups": offset_groups,
        "taps": draw(st.integers(1, 120)),
        "height": draw(st.integers(1, 40)),
        "width": draw(st.integers(1, 40)),
        "vector_size": draw(st.sampled_from([2, 4, 8, 16])),
        "threads": draw(st.integers(1, 64)),
    }


any_layout = given(arguments=layout_arguments())


@any_layout
def test_blocks_are_the_channels_in_turn(native: ModuleType, arguments: dict[str, int]) -> None:
    layout = native.Layout(*arguments.values())
    next_channel = 0
    for i in range(arguments["groups"] * layout.blocks_per_group):
        block = native.Block(layout, i)
        last = block.channel + block.channels - 1
        assert block.channel == next_channel
        assert 1 <= block.channels <= layout.block_channels
        assert block.channel // layout.group_channels == last // layout.group_channels
        assert block.offset_group == block.channel // layout.offset_group_channels
        assert block.offset_group == last // layout.offset_group_channels
        next_channel = last + 1
    assert next_channel == arguments["channels"]


@any_layout
def test_units_are_the_blocks_in_turn(native: ModuleType, arguments: dict[str, int]) -> None:
    layout = native.Layout(*arguments.values())
    next_block = 0
    for i in range(layout.units):
        unit = native.Unit(layout, i)
        blocks = [native.Block(layout, b) for b in range(unit.first_block, unit.last_block)]
        assert unit.first_block == next_block
        assert 1 <= len(blocks) <= layout.blocks_per_unit
        assert {block.channel // layout.group_channels for block in blocks} == {unit.group}
        assert unit.channel == blocks[0].channel
        assert unit.channels == sum(block.channels for block in blocks)
        next_block = unit.last_block
    assert next_block == arguments["groups"] * layout.blocks_per_group


@any_layout
def test_tap_ranges_are_the_taps_in_turn(native: ModuleType, arguments: dict[str, int]) -> None:
    layout = native.Layout(*arguments.values())
    ranges = [native.TapRange(layout, i) for i in range(layout.ranges)]
    assert [tap for taps in ranges for tap in range(taps.first, taps.first + taps.count)] == list(
        range(arguments["taps"])
    )
    assert all(1 <= taps.count <= layout.range_taps <= native.MAX_TAPS for taps in ranges)


@any_layout
def test_columns_of_a_unit_are_bounded(native: ModuleType, arguments: dict[str, int]) -> None:
    """Either about DEPTH of them, or those of a single block of MIN_BLOCK channels."""
    layout = native.Layout(*arguments.values())
    columns = layout.blocks_per_unit * layout.block_channels * layout.range_taps
    assert columns <= max(native.DEPTH, native.MIN_BLOCK * layout.range_taps)


@given(threads=st.integers(1, 64), eights=st.integers(1, 8), taps=st.integers(1, 49))
def test_channels_that_suffice_give_every_thread_a_unit(
    native: ModuleType, threads: int, eights: int, taps: int
) -> None:
    layout = native.Layout(8 * threads * eights, 1, 1, taps, 1, 1, 8, threads)
    assert layout.units >= threads


@any_layout
def test_points_outside_have_only_the_border_around_them(native: ModuleType, arguments: dict[str, int]) -> None:
    layout = native.Layout(*arguments.values())
    height, width = arguments["height"], arguments["width"]
    image = {(y + 1) * layout.pitch + x + 1 for y in range(height) for x in range(width)}
    first_corners = {(y + 1) * layout.pitch + x + 1 for y in range(-1, height) for x in range(-1, width)}
    around = [0, 1, layout.pitch, layout.pitch + 1]
    assert image.isdisjoint(layout.outside + corner for corner in around)
    assert max(first_corners | {layout.outside}) + around[-1] < layout.plane
    assert min(first_corners) == 0


@given(height=st.integers(1, 200), width=st.integers(1, 200), most_pixels=st.integers(32, 128))
def test_tiles_cover_every_output_once(native: ModuleType, height: int, width: int, most_pixels: int) -> None:
    tiling = native.Tiling(height, width, most_pixels)
    times = np.zeros((height, width), int)
    for i in range(tiling.count):
        tile = tiling[i]
        assert 1 <= tile.pixels() == tile.height * tile.width <= tiling.pixels() <= most_pixels <= native.TILE_PIXELS
        assert tile.width <= native.TILE_WIDTH
        times[tile.y : tile.y + tile.height, tile.x : tile.x + tile.width] += 1
        assert tile.y + tile.height <= height
        assert tile.x + tile.width <= width
    assert (times == 1).all()


# ---- the choice of instruction set -----------------------------------------------------------------------------------


def test_what_is_not_built_is_never_chosen() -> None:
    """The module of the default instruction set is built as for an architecture that has no other."""
    assert build("default").cpu_capability() == "DEFAULT"


@pytest.mark.parametrize("limit", [*INSTRUCTION_SETS, "AVX2", "nonsense", ""])
def test_the_environment_only_lowers(limit: str) -> None:
    """What torch does not know either limits nothing."""
    best = available_instruction_sets()[-1]
    module = build(best)
    code = f"import sys, torch; sys.path.append({str(REPOSITORY / 'build/native' / best)!r}); import {module.__name__};"
    chosen = run_python(f"{code} print({module.__name__}.cpu_capability())", ATEN_CPU_CAPABILITY=limit)
    allowed = limit if limit in INSTRUCTION_SETS else best
    assert chosen.strip().lower() == min(allowed, best, key=INSTRUCTION_SETS.index)


@pytest.mark.skipif(len(setup_script.INSTRUCTION_SETS) == 1, reason="this architecture has a single instruction set")
def test_torch_chooses_the_same() -> None:
    assert available_instruction_sets()[-1].upper() == torch.backends.cpu.get_cpu_capability()
