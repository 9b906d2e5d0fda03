"""Runs a plan through PyTorch's own FSDP2 on fake tensors and tracks what memory it holds.

One process stands for rank 0 of any number of ranks: the process group is PyTorch's fake one, and
tensors are fake, so nothing is computed, sent or allocated; but the code that shards, gathers,
reshards and reduces is FSDP2's, and autograd's order of freeing is autograd's.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from planner.space import Choice
from planner.stage import StagedModel
from planner.strategy import Strategy
from planner.workload import Workload
from profiler.source import ModelSource
from runtime.memory_tracker import LiveBytes, Peak


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meshes(strategies: set[Strategy], world_size: int) -> dict[Strategy, DeviceMesh]:
    """Return the mesh of each strategy. Call it outside of fake mode."""
    found = {}
    for strategy in sorted(strategies):
        if strategy.group == world_size:
            found[strategy] = init_device_mesh("cpu", (world_size,))
        else:
            shape = (world_size // strategy.group, strategy.group)
            found[strategy] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return found


def units(staged: StagedModel, choices: Sequence[Choice],
          spanning: Strategy | None) -> list[tuple[list[str], Strategy]]:  # fmt: skip
    """Return (module paths, strategy) of every unit; a block that is one unit is named itself."""
    graph, found = staged.graph, []
    for operator in staged.spanning:
        assert spanning is not None
        found.append((list(graph.operators[operator].modules), spanning))
    for stage, choice in zip(staged.stages, choices, strict=True):
        pairs = zip(stage.operators, choice.strategies, strict=True)
        runs = [(strategy, [o for o, _ in run]) for strategy, run in groupby(pairs, key=lambda pair: pair[1])]
        for strategy, operators in runs:
            if stage.block is not None and len(runs) == 1:
                found.append(([graph.blocks[stage.block].name], strategy))
            else:
                found.append(([path for o in operators for path in graph.operators[o].modules], strategy))
    return found


@dataclass(frozen=True)
class Tracked:
    """What one training step held at most."""

    peak: Peak
    rest_bytes: int
    """Live before the step."""


def track(source: ModelSource, staged: StagedModel, choices: Sequence[Choice], spanning: Strategy | None,
          load: Workload) -> Tracked:  # fmt: skip
    """Return the memory of a step (the second: the first makes optimizer states)."""
    wrapped = units(staged, choices, spanning)
    world_size = load.cluster.world_size
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if load.precision == "bf16" else MixedPrecisionPolicy()
    recomputed = [
        staged.graph.blocks[stage.block].name
        for stage, choice in zip(staged.stages, choices, strict=True)
        if choice.recompute and stage.block is not None
    ]
    live = LiveBytes()
    with fake_world(world_size), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh_of = meshes({strategy for _, strategy in wrapped}, world_size)
        with FakeTensorMode(), live:
            model = source.build()
            for name in recomputed:
                block = model.get_submodule(name)
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
            for paths, strategy in wrapped:
                modules = [model.get_submodule(path) for path in paths]
                fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh_of[strategy], mp_policy=policy,
                            reshard_after_forward=not strategy.keeps_unsharded)  # fmt: skip
            fully_shard(model, mesh=mesh_of[wrapped[0][1]], mp_policy=policy, reshard_after_forward=True)
            assert isinstance(model, FSDPModule)
            optimizer = torch.optim.Adam(model.parameters(), foreach=True)
            for _ in range(2):
                gc.collect()
                live.reset_peak()
                rest_bytes = live.total_bytes
                step(model, source, optimizer, load, live)
            del model, optimizer
    return Tracked(live.peak, rest_bytes)


def step(model: FSDPModule, source: ModelSource, optimizer: torch.optim.Optimizer, load: Workload,
         live: LiveBytes) -> None:  # fmt: skip
    """Run one step of training."""
    assert isinstance(model, nn.Module)
    for micro_step in range(load.accumulation):
        live.phase = "forward"
        args, kwargs = source.example_inputs(model, load.micro_batch)
        if load.accumulation > 1:
            model.set_requires_all_reduce(micro_step == load.accumulation - 1)
        loss = model(*args, **kwargs)
        live.phase = "backward"
        loss.backward()
        del args, kwargs, loss
    live.phase = "optimizer"
    optimizer.step()
    live.phase = "zero"
    optimizer.zero_grad()
