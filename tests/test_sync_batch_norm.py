"""SyncBatchNorm in two processes under DistributedDataParallel, against one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import random_tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from myvision.nn import BatchNorm2d, BatchNormAct2d, SyncBatchNorm, SyncBatchNormAct

WORLD = 2
BATCHES = {"even": (3, 3), "uneven": (1, 4), "one value each": (1, 1), "empty": (0, 4), "empty last": (4, 0)}
SHAPE = (6, 3, 5)
STEPS = 2


class Model(nn.Module):
    """A residual connection around a norm with an activation, in the middle of others."""

    def __init__(self, activation: str | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.mix = nn.Parameter(random_tensor(6, 6, seed=3))
        self.norm = BatchNormAct2d(6, activation=activation, **options) if activation else BatchNorm2d(6, **options)
        if self.norm.affine:
            nn.init.normal_(self.norm.weight, 1.0, 0.2, generator=torch.Generator().manual_seed(1))
            nn.init.normal_(self.norm.bias, 0.0, 0.2, generator=torch.Generator().manual_seed(2))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        mixed = torch.einsum("nihw,oi->nohw", x, self.mix.to(x.dtype))
        return self.norm(mixed + 100, residual=residual)  # far from zero, where sums would cancel


def case(batches: tuple[int, int], dtype: torch.dtype, step: int) -> list[Tensor]:
    """Input, residual and gradient of the output, of the whole batch."""
    shape = (sum(batches), *(SHAPE if batches != (1, 1) else (6, 1, 1)))
    return [random_tensor(*shape, dtype=torch.float64, seed=10 * step + i).to(dtype) for i in range(3)]


def steps(model: nn.Module, batches: tuple[int, int], dtype: torch.dtype, rank: int | None) -> dict[str, Any]:
    """Trains for some steps on the rank's share, or on everything: outputs, gradients and statistics."""
    results: dict[str, Any] = {"outputs": [], "inputs": [], "parameters": []}
    for step in range(STEPS):
        tensors = case(batches, dtype, step)
        if rank is not None:
            tensors = [t.split(list(batches))[rank] for t in tensors]
        input, residual, grad_output = tensors
        leaves = [input.requires_grad_(), residual.requires_grad_()]
        model.zero_grad()
        output = model(*leaves)
        output.backward(grad_output)
        results["outputs"].append(output.detach())
        results["inputs"].append([leaf.grad for leaf in leaves])
        results["parameters"].append({name: p.grad for name, p in model.named_parameters()})
    results["buffers"] = dict(model.named_buffers())
    with torch.no_grad():
        results["evaluation"] = model.eval()(*case((2, 2), dtype, 5)[:2])
    return results


def worker(rank: int, directory: str, cases: list[tuple[str, str | None, torch.dtype, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    results = []
    for name, activation, dtype, options in cases:
        model = SyncBatchNorm.convert_sync_batchnorm(Model(activation, options))
        parallel = DistributedDataParallel(model.to(dtype) if dtype == torch.float64 else model)
        results.append(steps(parallel, BATCHES[name], dtype, rank))
    torch.save(results, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


CASES: list[tuple[str, str | None, torch.dtype, dict[str, Any]]] = [
    *[(name, activation, torch.float64, {}) for name in BATCHES for activation in (None, "silu", "relu")],
    *[("uneven", "gelu", dtype, {}) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
    ("uneven", "relu", torch.float64, {"momentum": None}),
    ("uneven", "relu", torch.float64, {"affine": False}),
    ("uneven", "relu", torch.float64, {"track_running_stats": False}),
    ("even", None, torch.float32, {"eps": 1e-3, "momentum": 0.5}),
]


def in_processes(function: Callable[..., None], *arguments: object) -> None:
    """Of the server that helpers has, which has imported torch already."""
    mp.start_processes(function, args=arguments, nprocs=WORLD, start_method="forkserver")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What both processes got in every case."""
    directory = tmp_path_factory.mktemp("ranks")
    in_processes(worker, str(directory), CASES)
    return [torch.load(directory / f"{rank}.pt") for rank in range(WORLD)]


def name_of(index: int) -> str:
    name, activation, dtype, options = CASES[index]
    return f"{name} {activation} {str(dtype).removeprefix('torch.')} {options or ''}"


@pytest.mark.parametrize("index", range(len(CASES)), ids=name_of)
def test_two_processes_are_as_one(index: int, ranks: list[list[dict[str, Any]]]) -> None:
    name, activation, dtype, options = CASES[index]
    model = Model(activation, options)
    whole = steps(model.to(dtype) if dtype == torch.float64 else model, BATCHES[name], dtype, None)
    parts = [results[index] for results in ranks]
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}.get(dtype, 3e-2)
    close = {"rtol": tolerance, "atol": tolerance}
    for step in range(STEPS):
        joined = torch.cat([part["outputs"][step] for part in parts])
        torch.testing.assert_close(joined, whole["outputs"][step], **close)
        for i in (0, 1):
            gradients = [part["inputs"][step][i] for part in parts]
            torch.testing.assert_close(torch.cat(gradients), whole["inputs"][step][i], **close)
        for part in parts:  # DistributedDataParallel averages
            for parameter, gradient in whole["parameters"][step].items():
                actual = part["parameters"][step][f"module.{parameter}"] * WORLD
                scale = max(1.0, gradient.abs().max().item())
                torch.testing.assert_close(actual / scale, gradient / scale, **close)
    for part in parts:
        for buffer, value in whole["buffers"].items():
            torch.testing.assert_close(part["buffers"][f"module.{buffer}"], value, **close)
        torch.testing.assert_close(part["evaluation"], whole["evaluation"], **close)


def test_both_processes_have_the_same_statistics(ranks: list[list[dict[str, Any]]]) -> None:
    for first, second in zip(*ranks, strict=True):
        for name, buffer in first["buffers"].items():
            assert torch.equal(buffer, second["buffers"][name])


def _alone(rank: int, directory: str) -> None:
    """Everything else that needs processes, checked in them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    x = random_tensor(3, 6, 4, seed=rank)
    groups = [dist.new_group([i]) for i in range(WORLD)]
    alone = SyncBatchNorm(6, process_group=groups[rank])
    torch.testing.assert_close(alone(x), nn.BatchNorm1d(6)(x))  # a group of one process

    norm = SyncBatchNorm(6)
    before = norm.running_mean.clone()
    empty = norm(torch.empty(0, 6, 4))
    assert empty.shape == (0, 6, 4)
    assert torch.equal(norm.running_mean, before)  # every batch is empty

    norm = SyncBatchNormAct(6)
    channels_last = random_tensor(2, 6, 3, 4, seed=rank).contiguous(memory_format=torch.channels_last)
    output = norm(channels_last)
    assert output.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(norm(channels_last), output)
    whole = random_tensor(2 * WORLD, 6, 50) * 1e-2 + 1e4  # whose means a float does not hold
    expected = nn.BatchNorm1d(6).double()(whole.double()).float()
    torch.testing.assert_close(SyncBatchNorm(6)(whole.chunk(WORLD)[rank]), expected.chunk(WORLD)[rank])
    frozen = SyncBatchNorm(6).eval()
    torch.testing.assert_close(frozen(x), nn.BatchNorm1d(6).eval()(x))

    with torch.autocast("cpu", torch.bfloat16):  # a branch that a product left in bfloat16, and a residual stream
        assert norm(x.bfloat16(), x).dtype == torch.bfloat16

    DistributedDataParallel(nn.Sequential(SyncBatchNorm(6)))
    with pytest.raises(ValueError, match="only work with GPU modules"):  # torch's, as before
        DistributedDataParallel(nn.Sequential(SyncBatchNorm(6), nn.SyncBatchNorm(6)))

    before = norm.running_mean.clone()
    with pytest.raises(RuntimeError, match="residual must have"):
        norm(x, x[:1])
    assert torch.equal(norm.running_mean, before)

    leaf = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(SyncBatchNorm(6).double()(leaf).pow(3).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    dist.destroy_process_group()


def test_groups_empty_batches_layouts_and_second_derivatives(tmp_path: Path) -> None:
    in_processes(_alone, str(tmp_path))


def test_without_processes_it_is_a_batch_norm() -> None:
    assert not dist.is_initialized()
    x = random_tensor(3, 6, 4)
    torch.testing.assert_close(SyncBatchNormAct(6)(x), nn.BatchNorm1d(6)(x).relu())
    with pytest.raises(ValueError, match="at least 2D"):
        SyncBatchNorm(6)(torch.ones(6))
    with pytest.raises(ValueError, match="non-zero"):
        SyncBatchNorm(6)(torch.ones(2, 0, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        SyncBatchNorm(6)(torch.ones(1, 6))


def test_it_is_an_instance_of_torchs() -> None:
    assert issubclass(SyncBatchNorm, nn.SyncBatchNorm)
    assert not issubclass(SyncBatchNormAct, nn.modules.batchnorm._BatchNorm)
