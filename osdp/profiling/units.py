"""What a unit of FSDP2 costs beyond its collectives and its computation: hooks, and waiting for whoever is late.

A stack of L units with hardly any parameters computes matrix products, plain and under `fully_shard`, in turn.
Each unit is gathered twice and reduced once in a step, so with t the seconds of a step,

    overhead = (t_sharded - t_plain) / (3 L) - mean of the collectives' own times at that size

t_sharded is the slowest rank's, as all end together; t_plain the mean of all ranks, as the times of calls are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from osdp.profiling.device import timed_s
from profiler.measured import CollectiveTimes
from runtime.agreement import Ranks
from runtime.meshes import Meshes

UNITS = 8
ROWS = {"cpu": 256, "cuda": 2048}
"""Of the matrices by kind of device."""
PRODUCTS = 4
"""Of a unit's forward, and of its backward."""
TENSORS = 12
"""Parameter tensors of a unit, as many as a layer of GPT-2 has: FSDP2 handles each."""
ELEMENTS = 128
"""Of each."""
WARM_UP_ROUNDS = 2
EVENTS = 3
"""Gathers and reductions of a unit in a step."""


class _Unit(nn.Module):
    """Multiplies by a fixed matrix, several times."""

    matrix: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(ELEMENTS) for _ in range(TENSORS))
        self.register_buffer("matrix", torch.randn(rows, rows) / rows**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * sum(weight[0] for weight in self.weights) / TENSORS
        for _ in range(PRODUCTS):
            x = x @ self.matrix
        return x


def measure_unit_overhead_s(times: tuple[CollectiveTimes, ...], nodes: int, ranks_per_node: int, repetitions: int,
                            device: torch.device, meet: Callable[[], None]) -> float:  # fmt: skip
    """Return the seconds of overhead of one gather or reduction, at least 0. A collective call."""
    rows = ROWS[device.type]
    plain, sharded = (nn.Sequential(*(_Unit(rows) for _ in range(UNITS))).to(device) for _ in range(2))
    mesh = Meshes(device.type, nodes, ranks_per_node).mesh(nodes * ranks_per_node)
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)
    x = torch.randn(rows, rows, device=device, requires_grad=True)
    found: list[tuple[float, float]] = []
    for _ in range(WARM_UP_ROUNDS + repetitions):
        seconds = []
        for module in (plain, sharded):
            meet()
            seconds.append(timed_s(partial(_step, module, x), device))
        found.append((seconds[0], seconds[1]))
    everyone = Ranks.all().gather("measure units", lambda: found[WARM_UP_ROUNDS:])
    plain_s = median(fmean(one[0] for one in of_ranks) for of_ranks in zip(*everyone, strict=True))
    sharded_s = median(max(one[1] for one in of_ranks) for of_ranks in zip(*everyone, strict=True))
    size_bytes = 4 * TENSORS * ELEMENTS
    own = {one.operation: one.time_s(size_bytes) for one in times
           if (one.ranks, one.stride, one.algorithm) == (dist.get_world_size(), 1, "native")}  # fmt: skip
    collectives_s = (2 * own["all_gather"] + own["reduce_scatter"]) / EVENTS
    return float(max(0.0, (sharded_s - plain_s) / (EVENTS * UNITS) - collectives_s))


def _step(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()
    module.zero_grad()
