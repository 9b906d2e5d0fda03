"""Runs a plan through PyTorch's own FSDP2 on fake tensors and tracks what memory it holds.

One process stands for rank 0 of any number of ranks: the process group is PyTorch's fake one, and
tensors are fake, so nothing is computed, sent or allocated; but the code that shards, gathers,
reshards and reduces is FSDP2's, and autograd's order of freeing is autograd's.

`LiveBytes` is a dispatch mode that adds up storages: it sees every tensor that an op returns, every
`resize_` (which is how FSDP2 allocates and frees unsharded parameters), and every storage's death.
Each storage counts rounded up to 512 bytes, as the CUDA caching allocator does.  Memory inside a
kernel is invisible to it.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from planner.space import Choice
from planner.stage import StagedModel
from planner.strategy import Strategy
from planner.workload import Workload
from profiler.source import ModelSource

BLOCK_BYTES = 512


def rounded(size_bytes: int) -> int:
    """Return what a caching allocator hands out for a request."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation."""

    total_bytes: int
    """Live bytes after it."""
    phase: str
    op: str
    node: str
    """Autograd node that runs, if any."""


class LiveBytes(TorchDispatchMode):
    """Adds up live storages. Every tensor must be made under it to be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0
        self.phase = "init"
        self.events: list[Event] = []
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        tracker, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
            resize(storage, size_bytes)
            tracker._hold(storage, "resize_")
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor unwraps itself; its local ops come back here
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage(), str(func))
        return out

    def _hold(self, storage: torch.UntypedStorage, op: str) -> None:
        key, size = storage._cdata, rounded(storage.nbytes())
        if key not in self._live:
            self._live[key] = (weakref.ref(storage, partial(self._release, key)), 0)
        reference, known = self._live[key]
        self._live[key] = (reference, size)
        self.total_bytes += size - known
        if size > known:
            node = torch._C._current_autograd_node()
            self.events.append(Event(self.total_bytes, self.phase, op, "" if node is None else node.name()))

    def _release(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        known, size = self._live[key]
        if known is reference:
            del self._live[key]
            self.total_bytes -= size


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

    peak: Event
    rest_bytes: int
    """Live before the step."""
    events: list[Event]


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
                live.events.clear()
                rest_bytes = live.total_bytes
                step(model, source, optimizer, load, live)
            del model, optimizer
    gc.collect()
    peak = max(live.events, key=lambda event: event.total_bytes)
    return Tracked(peak, rest_bytes, list(live.events))


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
