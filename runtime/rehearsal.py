"""Rehearses training steps of a schedule without computing: what one rank of any number holds at most.

One process stands for one rank.  The process group is PyTorch's fake one, and tensors are fake, so
nothing is computed, sent or allocated; but what wraps, gathers, frees and reduces is this runtime
with FSDP2's own code, and autograd's order of freeing is autograd's.  `LiveBytes` adds up.

The second step is what counts: in the first, the optimizer makes its states, and DTensor looks at
tensors of global size.  What a storage is for is read off the program:

    parameters             of the wrapped module, local parts
    optimizer              states that the optimizer keeps
    gradients              of local parameters, and of gathered ones from when autograd has added them up
    unsharded_parameters   what modules compute with, where it is not what rests
    communication_buffers  arguments of collectives that are none of these
    optimizer_temporaries  what else is made in the optimizer's step
    activations            all the rest
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from profiler.errors import OsdpError
from runtime.accumulation import Accumulation
from runtime.memory_tracker import HOST, LiveBytes, Peak
from runtime.meshes import Meshes
from runtime.optimizers import OPTIMIZERS
from runtime.ring import short_rings
from runtime.schedule import Schedule
from runtime.sharded import ShardedModel, apply_schedule
from runtime.torch_compat import few_chunks, forget_meshes, rehearse_buckets, rehearsing_data_parallel


@dataclass(frozen=True)
class Script:
    """What is rehearsed: a model and how it trains."""

    build: Callable[[], nn.Module]
    """Makes the model."""
    feed: Callable[[nn.Module, int], tuple[Sequence[Any], dict[str, Any]]]
    """(module, micro-batch) -> arguments of its forward."""
    find_loss: Callable[[Any], Tensor]
    """Output of the forward -> scalar to start backward from."""
    optimizer: str
    """Key of `runtime.optimizers.OPTIMIZERS`."""
    micro_batch: int
    """Samples in one forward."""


@dataclass(frozen=True)
class Rehearsal:
    """What one training step holds."""

    peak: Peak
    """Phase `forward`, `backward` or `optimizer`."""
    rest_bytes: int
    """Live between steps."""


def rehearse(script: Script, schedule: Schedule, rank: int = 0) -> Rehearsal:
    """Return what a rank of the schedule's world holds in a training step.

    Takes no memory for weights.  There must be no process group.  Raises what the model or its
    wrapping raise, and OsdpError for what the runtime refuses.
    """
    if dist.is_initialized():
        raise OsdpError("a rehearsal needs a process of its own", got="a process group that is at work")
    with _fake_world(schedule.world_size, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _make_meshes(schedule)
        live = _Labelled()
        with FakeTensorMode(allow_non_fake_inputs=True), live, few_chunks(), short_rings():
            live.category = "activations"
            model = script.build()
            with rehearsing_data_parallel():
                sharded = apply_schedule(model, schedule, torch.device("cpu"))
            if sharded.runner is not None:
                rehearse_buckets(sharded.runner)
            live.watch(sharded)
            # On a GPU optimizers step through all tensors together unless told not to, and so they do here.
            make = OPTIMIZERS[script.optimizer]
            optimizers = [make(parameters, foreach=True) for parameters in live.by_home() if parameters]
            run = Accumulation(sharded, schedule.accumulation).run
            for _ in range(2):
                gc.collect()
                live.reset_peak()
                rest_bytes = live.total_bytes
                for _ in range(schedule.accumulation):
                    _train(run, model, script, live)
                live.step(optimizers)
            peak = live.peak
            del optimizers, model, sharded, run
    return Rehearsal(peak, rest_bytes)


def _train(run: Callable[..., Any], model: nn.Module, script: Script, live: LiveBytes) -> None:
    """Run one micro-batch forward and backward."""
    live.phase = "forward"
    args, kwargs = script.feed(model, script.micro_batch)
    loss = script.find_loss(run(*args, **kwargs))
    live.phase = "backward"
    loss.backward()  # type: ignore[no-untyped-call]


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Be one rank of a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    forget_meshes()
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()


def _make_meshes(schedule: Schedule) -> None:
    """Make all meshes outside of fake mode: they compute with their tensors of ranks."""
    meshes = Meshes("cpu", schedule.nodes, schedule.ranks_per_node)
    meshes.mesh(schedule.world_size)
    for unit in schedule.units:
        meshes.mesh(unit.strategy.group)
        if unit.strategy.secondary:
            meshes.mesh(unit.strategy.secondary)


class _Labelled(LiveBytes):
    """Knows what storages are for."""

    def __init__(self) -> None:
        super().__init__()
        self.homes: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        """Category of what rests of a parameter that is offloaded; empty for others."""
        self.hooked: MutableMapping[Tensor, None] = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("c10d", "fsdp") and out is not NotImplemented:
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, Tensor) and self.category_of(leaf) == "activations":
                    self.label(leaf, "communication_buffers")
        return out

    def watch(self, sharded: ShardedModel) -> None:
        """Label what rests, and from now on what is gathered and what gradients are made."""
        offloaded = {p.path for unit in sharded.schedule.units for p in unit.parameters if unit.strategy.offload}
        for name, parameter in sharded.module.named_parameters():
            self.homes[parameter] = HOST if name in offloaded else ""
            self.hold([parameter], self.homes[parameter] or "parameters")
            self._watch_gradient(parameter)
        self.hold(sharded.module.buffers())
        for module in sharded.module.modules():
            if module._parameters:
                module.register_forward_pre_hook(self._label_used)
            if isinstance(module, FSDPModule):
                module.register_forward_hook(self._label_kept)

    def by_home(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that rest on the device, and those on the host."""
        here = [parameter for parameter, home in self.homes.items() if not home]
        return here, [parameter for parameter, home in self.homes.items() if home]

    def _label_used(self, module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and self.category_of(parameter) not in ("parameters", HOST):
                self.label(parameter, "unsharded_parameters")
                self._watch_gradient(parameter)

    def _label_kept(self, module: nn.Module, *_: Any) -> None:
        """Label what a unit keeps from forward to backward: a secondary copy."""
        for parameter in module.parameters():
            if self.category_of(parameter) == "activations":
                self.label(parameter, "unsharded_parameters")

    def _watch_gradient(self, parameter: Tensor) -> None:
        if parameter.requires_grad and parameter not in self.hooked:
            self.hooked[parameter] = None
            parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.label(parameter.grad, self.homes.get(parameter, "") or "gradients")

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Run the optimizers' steps and drop the gradients."""
        self.phase = "optimizer"
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            home = self.homes[parameters[0]]
            self.category = home or "optimizer_temporaries"
            for parameter in parameters:
                self._label_gradient(parameter)  # of buckets, no hook has told
            optimizer.step()
            for value in tree_leaves(list(optimizer.state.values())):
                if isinstance(value, Tensor):
                    self.label(value, home or "optimizer")
        self.phase, self.category = "zero", "activations"
        for optimizer in optimizers:
            optimizer.zero_grad()
