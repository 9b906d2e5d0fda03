"""The recorder against collectives counted by hand, for each of torch's parallelisms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from profiler.collective_ops import Recorded
from runtime.observe.collective_log import record_collectives

WORLD = (0, 1, 2, 3)
FLOAT, HALF = torch.float32, torch.bfloat16
LINEAR_BYTES = (8 * 8 + 8) * 4
"""Size of `nn.Linear(8, 8)`; both its dimensions divide by 4 ranks, so nothing is padded."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _sharded(shape: tuple[int, ...], **options: Any) -> nn.Sequential:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = _model()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def _fsdp(rank: int, shape: tuple[int, ...], options: dict[str, Any]) -> list[Recorded]:
    model = _sharded(shape, **options)
    with record_collectives() as record:
        _step(model)
    _step(model)  # outside: must not be seen
    return record


def _accumulated(rank: int) -> list[Recorded]:
    model = _sharded((2, 2))
    with record_collectives() as record:
        for last in (False, True):
            model.set_requires_all_reduce(last)
            _step(model)
    return record


def _ddp(rank: int) -> list[Recorded]:
    model = DistributedDataParallel(_model())
    _step(model)  # in the first two steps DDP also agrees on its buckets
    _step(model)
    with record_collectives() as record:
        _step(model)
    return record


def _plain(rank: int) -> list[Recorded]:
    group = dist.new_group([1, 3])
    whole, part = torch.zeros(8), torch.zeros(2)
    with record_collectives() as record:
        dist.broadcast(whole, 2)
        dist.reduce(whole, 1)
        dist.all_gather(list(whole.split(2)), part)
        dist.scatter(part, list(whole.split(2)) if rank == 0 else None, src=0)
        dist.gather(part, list(whole.split(2)) if rank == 0 else None, dst=0)
        dist.all_to_all_single(torch.empty(8), whole)
        dist.barrier()
        if rank in (1, 3):
            dist.all_reduce(whole, group=group)
    return record


def _redistributed(rank: int) -> list[Recorded]:
    mesh = init_device_mesh("cpu", (4,))
    shard = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])
    term = DTensor.from_local(torch.zeros(8), mesh, [Partial()])
    with record_collectives() as record:
        shard.full_tensor()
        term.redistribute(placements=[Shard(0)])
        term.full_tensor()
    return record


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    for record in run_ranks(_fsdp, 4, (4,), {}):
        assert Counter(record) == {
            Recorded("all_gather", WORLD, LINEAR_BYTES, FLOAT): 4,
            Recorded("reduce_scatter", WORLD, LINEAR_BYTES, FLOAT): 2,
        }
        assert [entry.operation for entry in record][:2] == ["all_gather", "all_gather"]


def test_zero_2_gathers_once() -> None:
    for record in run_ranks(_fsdp, 4, (4,), {"reshard_after_forward": False}):
        assert Counter(record) == {
            Recorded("all_gather", WORLD, LINEAR_BYTES, FLOAT): 2,
            Recorded("reduce_scatter", WORLD, LINEAR_BYTES, FLOAT): 2,
        }


def test_sizes_and_types_follow_mixed_precision() -> None:
    for record in run_ranks(_fsdp, 4, (4,), {"mp_policy": MixedPrecisionPolicy(HALF, FLOAT)}):
        assert Counter(record) == {
            Recorded("all_gather", WORLD, LINEAR_BYTES // 2, HALF): 4,
            Recorded("reduce_scatter", WORLD, LINEAR_BYTES, FLOAT): 2,
        }


def test_hsdp_reduces_its_shard_across_groups() -> None:
    for rank, record in enumerate(run_ranks(_fsdp, 4, (2, 2), {})):
        inside = (0, 1) if rank < 2 else (2, 3)
        across = (0, 2) if rank % 2 == 0 else (1, 3)
        assert Counter(record) == {
            Recorded("all_gather", inside, LINEAR_BYTES, FLOAT): 4,
            Recorded("reduce_scatter", inside, LINEAR_BYTES, FLOAT): 2,
            Recorded("all_reduce", across, LINEAR_BYTES // 2, FLOAT): 2,
        }


def test_a_mesh_that_only_replicates_all_reduces_whole_gradients() -> None:
    for record in run_ranks(_fsdp, 4, (4, 1), {}):
        traffic = [entry for entry in record if len(entry.ranks) > 1]
        assert Counter(traffic) == {Recorded("all_reduce", WORLD, LINEAR_BYTES, FLOAT): 2}


def test_accumulation_all_reduces_once() -> None:
    for record in run_ranks(_accumulated, 4):
        assert Counter(entry.operation for entry in record) == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 2}


def test_ddp_all_reduces_its_bucket() -> None:
    for record in run_ranks(_ddp, 4):
        assert record == [Recorded("all_reduce", WORLD, 2 * LINEAR_BYTES, FLOAT)]


def test_plain_collectives_on_groups() -> None:
    expected = [
        Recorded("broadcast", WORLD, 32, FLOAT),
        Recorded("reduce", WORLD, 32, FLOAT),
        Recorded("all_gather", WORLD, 32, FLOAT),
        Recorded("scatter", WORLD, 32, FLOAT),
        Recorded("gather", WORLD, 32, FLOAT),
        Recorded("all_to_all", WORLD, 32, FLOAT),
    ]
    for rank, record in enumerate(run_ranks(_plain, 4)):
        assert record[:6] == expected
        assert (record[6].operation, record[6].ranks, record[6].size_bytes) == ("barrier", WORLD, 0)
        assert record[7:] == ([Recorded("all_reduce", (1, 3), 32, FLOAT)] if rank in (1, 3) else [])


def test_functional_collectives_of_dtensor() -> None:
    for record in run_ranks(_redistributed, 4):
        assert record == [Recorded(kind, WORLD, 32, FLOAT) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
