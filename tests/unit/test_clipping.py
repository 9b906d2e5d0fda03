"""Clipping on one rank: how many operations it takes, and that it does what PyTorch's does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.local_shards import LocalShard, local_shard, whole
from runtime.step.grad_norm import clip, scale_to, total_norm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Operations(TorchDispatchMode):
    """Counts what PyTorch dispatches: on a GPU the host needs some microseconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def gradients(tensors: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 1 + number % 5).to(dtype) for number in range(tensors)]


def shards_of(found: list[Tensor], replicas: int = 1) -> list[LocalShard]:
    """Return parameters with these gradients: DTensors of two meshes in turn, and plain tensors."""
    meshes = [init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1,)), None]
    shards = []
    for number, gradient in enumerate(found):
        mesh, own = meshes[number % len(meshes)], gradient.clone()
        held = own if mesh is None else DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        parameter = nn.Parameter(torch.zeros_like(held))
        parameter.grad = held
        shards.append(local_shard(whole(str(number), own.shape), parameter, replicas))
    return shards


def operations(tensors: int) -> int:
    shards = [*shards_of(gradients(tensors)), *shards_of(gradients(tensors, torch.bfloat16))]
    with Operations() as seen:
        clip(shards, 1.0, 2.0, CPU)
    return seen.count


def test_operations_do_not_grow_with_the_tensors() -> None:
    assert operations(6) == operations(96) < 40


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norm_and_gradients_are_as_of_torch(norm_type: float) -> None:
    plain = [nn.Parameter(torch.zeros_like(one)) for one in gradients(12)]
    for parameter, gradient in zip(plain, gradients(12), strict=True):
        parameter.grad = gradient
    wanted = nn.utils.clip_grad_norm_(plain, 0.5, norm_type)
    shards = shards_of(gradients(12))
    got = clip(shards, 0.5, norm_type, CPU)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)
    for shard, parameter in zip(shards, plain, strict=True):
        torch.testing.assert_close(shard.local(shard.parameter.grad), parameter.grad, rtol=1e-6, atol=0.0)


def test_norms_of_bf16_are_of_fp32() -> None:
    found = [torch.full((4096,), 0.01).bfloat16()] * 2
    norm = total_norm(shards_of(found), 2.0, CPU)
    assert norm.item() == pytest.approx(8192**0.5 * found[0][0].item(), rel=1e-5)


def test_what_several_ranks_hold_counts_once() -> None:
    found = gradients(2)
    once, twice = shards_of(found[:1]), shards_of(found[1:], replicas=2)
    expected = (found[0].double().norm() ** 2 + found[1].double().norm() ** 2 / 2) ** 0.5
    assert total_norm([*once, *twice], 2.0, CPU).item() == pytest.approx(expected.item(), rel=1e-6)


def test_parameters_without_a_gradient_or_a_part_are_left_out() -> None:
    found = gradients(3)
    shards = [*shards_of(found), *shards_of([torch.zeros(0, 4)])]
    shards[1].parameter.grad = None
    for norm_type in (2.0, math.inf):
        got = total_norm(shards, norm_type, CPU)
        assert got.item() == pytest.approx(torch.cat([found[0].flatten(), found[2].flatten()]).norm(norm_type).item())
    scale_to(shards, 0.5, torch.tensor(1.0))
    torch.testing.assert_close(shards[0].local(shards[0].parameter.grad), found[0] / 2)
    assert shards[1].parameter.grad is None
    assert total_norm([], 2.0, CPU) == 0.0
